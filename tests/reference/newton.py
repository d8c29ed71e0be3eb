"""Newton-type steps with dense matrices: GIANT (Wang et al. 2018), DONE (Dinh et al. 2022), and a small subspace."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .common import (
    Client,
    Cohorts,
    Order,
    Params,
    by_examples,
    example_gradients,
    flat,
    gradient,
    mean_loss,
    named,
    rounds,
    weighted_mean,
    with_params,
)
from .curvature import output_hessian, output_jacobian
from .fedavg import train
from .fisher_lbfgs import smallest


def dense(module: nn.Module, client: Client, matrix: str) -> Tensor:
    """The Gauss-Newton or empirical Fisher matrix of a client's examples, d x d."""
    x, y = client
    if matrix == "fisher":
        return sum(torch.outer(g, g) for g in example_gradients(module, x, y)) / len(y)
    total = 0
    for i in range(len(y)):
        output, jacobian = output_jacobian(module, x[i])
        total = total + jacobian.T @ output_hessian(output, y[i], None) @ jacobian
    return total / len(y)


def hessian(module: nn.Module, client: Client) -> Tensor:
    """The Hessian of the mean loss, by differentiating twice, d x d."""
    x, y = client

    def f(vector: Tensor) -> Tensor:
        pieces = named_through(module, vector)
        return nn.functional.cross_entropy(torch.func.functional_call(module, pieces, (x,)), y)

    return torch.autograd.functional.hessian(f, flat(module))


def named_through(module: nn.Module, vector: Tensor) -> Params:
    """`named` that can be differentiated."""
    pieces = vector.split([param.numel() for param in module.parameters()])
    return {n: piece.view(p.shape) for (n, p), piece in zip(module.named_parameters(), pieces, strict=True)}


def richardson(a: Tensor, g: Tensor, alpha: float, iterations: int) -> Tensor:
    """sum_{r < R} alpha (I - alpha A)^r g: what R iterations from 0 amount to."""
    shrink = torch.eye(len(g), dtype=g.dtype) - alpha * a
    return sum(alpha * torch.linalg.matrix_power(shrink, r) @ g for r in range(iterations))


def local_newton(
    module: nn.Module,
    clients: list[Client],
    cohorts: Cohorts,
    *,
    solver: str,
    lr: float,
    weight_decay: float,
    damping: float,
    matrix: str = "gauss_newton",
    iterations: int = 0,
    alpha: float = 0.0,
    candidates: Sequence[float] = (),
) -> Params:
    """GIANT ("exact") solves each client's system with a dense solver, DONE ("richardson") by the sum of powers."""
    w = flat(module)
    for _, (cohort, *_rest) in rounds(cohorts):
        model = with_params(module, w)
        weights = [by_examples(len(clients[k][1])) for k in cohort]
        g = weighted_mean([gradient(model, *clients[k]) for k in cohort], weights) + weight_decay * w
        steps = []
        for k in cohort:
            a = dense(model, clients[k], matrix) + (weight_decay + damping) * torch.eye(len(w), dtype=w.dtype)
            solved = torch.linalg.solve(a, g) if solver == "exact" else richardson(a, g, alpha, iterations)
            steps.append(solved)
        p = weighted_mean(steps, weights)
        length = 1.0
        if len(candidates) > 0:
            losses = [penalised(module, clients, cohort, w - a * lr * p, weight_decay) for a in candidates]
            length = candidates[smallest(losses)]
        w = w - lr * length * p
    return named(module, w)


def penalised(module: nn.Module, clients: list[Client], cohort: Sequence[int], w: Tensor, weight_decay: float) -> float:
    model = with_params(module, w)
    values = [mean_loss(model, *clients[k]).detach() for k in cohort]
    weights = [by_examples(len(clients[k][1])) for k in cohort]
    return float(weighted_mean(values, weights) + weight_decay / 2 * (w @ w))


def subspace_newton(
    module: nn.Module,
    clients: list[Client],
    cohorts: Cohorts,
    order: Order,
    *,
    lr: float,
    epochs: int,
    batch_size: int | None,
    weight_decay: float,
    memory: int,
    centre: str,
    matrix: str,
    dampings: Sequence[float],
) -> Params:
    """Local training, then the best by loss of FedAvg's point and damped Newton steps in V, none beyond 10 |u|."""
    w, steps = flat(module), []
    for t, (cohort, *_rest) in rounds(cohorts):
        model = with_params(module, w)
        weights = [by_examples(len(clients[k][1])) for k in cohort]
        options = {"lr": lr, "weight_decay": weight_decay}
        deltas = [train(model, clients[k], order(t, 0, k, epochs, batch_size), **options) for k in cohort]
        u = weighted_mean(deltas, weights)
        v = torch.stack([u, *steps], dim=1)  # d x k
        c = w + u if centre == "update" else w
        there = with_params(module, c)
        g = weighted_mean([gradient(there, *clients[k]) for k in cohort], weights) + weight_decay * c
        b = weighted_mean([dense(there, clients[k], matrix) for k in cohort], weights)
        b = b + weight_decay * torch.eye(len(w), dtype=w.dtype)
        small = v.T @ b @ v
        points = [w + u]
        for damping in dampings:
            damped = small + damping * torch.diag(small.diagonal())
            step = c - w - v @ torch.linalg.solve(damped, v.T @ g)
            points.append(w + step * min(1.0, 10 * float(u.norm() / step.norm())))
        best = smallest([penalised(module, clients, cohort, point, weight_decay) for point in points])
        steps = [points[best] - w, *steps][:memory]
        w = points[best]
    return named(module, w)
