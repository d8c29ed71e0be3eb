"""Theorem 1's constants on the convex problem: what they are, and what the bound then says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad

import fedge
from fedge.algorithms.lbfgs import Pair
from fedge.core import Params

from .convex import L2, PARTITIONS, objective
from .problem import Objective, federation
from .store import save

BATCH = 100  # examples that a round of 20 clients with one batch of 5 sees
EVERY = 5  # rounds between two looks at the eigenvalues of H_t
RUNS: dict[str, dict[str, Any]] = {  # rounds and cohort, and what is changed from FisherLBFGS's theory form
    "every client, all batches, step 1": {"rounds": 150, "cohort": None, "lr": 1.0},
    "20 of 100 clients, one batch of 5, step 0.5": {"rounds": 300, "cohort": 20, "lr": 0.5, "batches": 1},
}


def inputs_of(f: Objective) -> Tensor:
    """z = (x, 1), [n, 65]."""
    return torch.cat([f.x.flatten(1), torch.ones(len(f.x), 1, dtype=f.x.dtype)], 1)


def together(params: Params) -> Tensor:
    """Weight and bias as one matrix that z is multiplied with, [10, 65]."""
    weight, bias = params.values()
    return torch.cat([weight, bias[:, None]], 1)


def probabilities(f: Objective, params: Params) -> Tensor:
    return torch.softmax(inputs_of(f) @ together(params).T, 1)


def hessian(f: Objective, params: Params) -> Tensor:
    """Of softmax regression with its penalty, [650, 650], in the order of `together`.

    The mean over the examples of the Kronecker products (diag p - p p^T) x (z z^T), plus l2 I.
    """
    z, p = inputs_of(f), probabilities(f, params)  # [n, D], [n, C]
    classes, inputs = p.shape[1], z.shape[1]
    found = torch.zeros(classes, inputs, classes, inputs, dtype=z.dtype)
    for a in range(classes):
        for b in range(classes):
            share = p[:, a] * (float(a == b) - p[:, b])
            found[a, :, b] = (share[:, None] * z).T @ z / len(z)
    flat = found.reshape(classes * inputs, classes * inputs)
    return flat + f.l2 * torch.eye(len(flat), dtype=flat.dtype)


def optimum(f: Objective, steps: int = 12) -> Params:
    """w*, by Newton's method with that Hessian, to a gradient of rounding size."""
    params = {name: torch.zeros_like(leaf) for name, leaf in f.start().items()}
    for _ in range(steps):
        slopes = together(grad(f)(params))
        moved = together(params) - torch.linalg.solve(hessian(f, params), slopes.flatten()).view_as(slopes)
        params = dict(zip(params, (moved[:, :-1], moved[:, -1]), strict=True))
    return params


def smoothness(f: Objective) -> float:
    """The largest curvature anywhere: diag p - p p^T is at most 1/2, so L <= lambda_max(z z^T mean) / 2 + l2."""
    z = inputs_of(f)
    return float(torch.linalg.eigvalsh(z.T @ z / len(z))[-1]) / 2 + f.l2


def noise(f: Objective, best: Params) -> float:
    """N = 2 E |grad f_i(w*)|^2, f_i with its share of the penalty."""
    slopes = probabilities(f, best) - torch.nn.functional.one_hot(f.y)
    each = torch.einsum("nc,nd->ncd", slopes, inputs_of(f)) + f.l2 * together(best)
    return 2 * float((each**2).sum((1, 2)).mean())


def extremes(pairs: list[Pair]) -> tuple[float, float]:
    """The smallest and the largest eigenvalue of the L-BFGS matrix of the pairs, by the dense recursion."""
    flat = [tuple(torch.cat([leaf.flatten() for leaf in one.values()]) for one in pair) for pair in pairs]
    s, y = flat[-1]
    h = (s @ y / (y @ y)) * torch.eye(len(s), dtype=s.dtype)
    for s, y in flat:
        rho = 1 / (s @ y)
        hy = h @ y
        h = h - rho * (torch.outer(s, hy) + torch.outer(hy, s)) + rho * (1 + rho * (y @ hy)) * torch.outer(s, s)
    values = torch.linalg.eigvalsh((h + h.T) / 2)
    return float(values[0]), float(values[-1])


@dataclass(frozen=True, eq=False)
class Spectrum(fedge.FisherLBFGS):
    """FisherLBFGS that notes the extreme eigenvalues of H_t every few rounds."""

    def notes(self, state: Any) -> dict[str, Any]:
        found = super().notes(state)
        if state["pairs"] and found["accepted_pairs"] % EVERY == 0:
            found["theta"] = extremes(state["pairs"])
        return found


def thetas(f: Objective, kind: str, rounds: int, cohort: int | None, **options: Any) -> tuple[float, float]:
    """theta_1 and theta_2: the extremes over a run."""
    theory: dict[str, Any] = {"source": "gradient", "curvature": "product", "matrix": "gauss_newton", "batch_size": 5}
    algorithm = Spectrum(f.model, weight_decay=L2, damping=0.0, **theory, **options)
    observe = fedge.Observe(evaluate_every=rounds)
    run = fedge.train(algorithm, federation(kind), rounds=rounds, cohort=cohort, observe=observe)
    found = [record["theta"] for record in run.history if "theta" in record]
    return min(low for low, _ in found), max(high for _, high in found)


def bound(strong: float, smooth: float, theta: tuple[float, float], batch: int, examples: int, n: float) -> Any:
    """Theorem 1 with these constants: the largest step, and rate and neighbourhood at half of it, the fastest."""
    beta = (examples - batch) / (batch * (examples - 1))
    mu = theta[1] ** 2 * (strong + smooth * beta) * smooth
    largest = strong * theta[0] / mu
    step = largest / 2
    shrink = 2 * step * (strong * theta[0] - step * mu)
    near = step * theta[1] ** 2 * smooth * n / (4 * (strong * theta[0] - step * mu))
    return {
        "beta": beta,
        "mu": mu,
        "largest_step": largest,
        "shrink": shrink,
        "rounds_to_half": math.log(2) / shrink,
        "neighbourhood": near,
    }


def main() -> None:
    f = objective()
    best = optimum(f)
    low, high = (float(v) for v in torch.linalg.eigvalsh(hessian(f, best))[[0, -1]])
    result: dict[str, Any] = {
        "examples": len(f.y),
        "strong": f.l2,
        "smooth": smoothness(f),
        "at_optimum": [low, high],
        "N": noise(f, best),
        "start_gap": float(f(f.start()) - f(best)),
        "gradient_norm": math.sqrt(f.squared_gradient(best)),
        "runs": [],
    }
    for name, setting in RUNS.items():
        for kind in PARTITIONS:
            theta = thetas(f, kind, **setting)
            batch = result["examples"] if setting["cohort"] is None else BATCH
            n = 0.0 if setting["cohort"] is None else result["N"]
            said = bound(result["strong"], result["smooth"], theta, batch, result["examples"], n)
            result["runs"].append({"run": name, "partition": kind, "step": setting["lr"], "theta": theta, **said})
    save("constants", result)
