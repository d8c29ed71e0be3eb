"""The paper's L-BFGS with Fisher curvature pairs (Alg. 1, Eq. 6-9)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .common import (
    Client,
    Cohorts,
    Loss,
    Order,
    Params,
    Weight,
    by_examples,
    flat,
    flatten,
    gradient,
    mean_loss,
    named,
    rounds,
    weighted_mean,
    with_params,
)
from .curvature import fisher_diagonal, fisher_product, gauss_newton_product, squared_slope_product
from .fedavg import train
from .two_loop import Pair, two_loop

PRODUCTS = {
    "fisher": fisher_product,
    "gauss_newton": gauss_newton_product,
    "squared_slopes": squared_slope_product,
}


def fisher_lbfgs(
    module: nn.Module,
    clients: list[Client],
    cohorts: Cohorts,
    order: Order,
    *,
    source: str = "gradient",
    curvature: str = "diagonal",
    matrix: str = "fisher",
    curvature_at: str = "same",
    epochs: int,
    batch_size: int | None,
    local_lr: float,
    clip: float | None = None,
    lr: float,
    memory: int,
    damping: float,
    weight_decay: float,
    first_step: float | None,
    floor: float = 1e-8,
    candidates: Sequence[float] = (),
    dampings: Sequence[float] = (),
    direction: str = "pairs",
    weight: Weight = by_examples,
    loss: Loss | None = None,
) -> tuple[Params, int]:
    """The final parameters and the number of refused pairs.

    p = -H g, s = a p, y = B s + (weight_decay + damping) s. `matrix` says which B the product
    form takes; the diagonal form always takes the Fisher diagonal.
    """
    assert source in ("gradient", "update")
    assert curvature in ("diagonal", "product")
    assert matrix in PRODUCTS
    assert curvature_at in ("same", "next")

    def client_gradient(model: nn.Module, t: int, k: int) -> Tensor:
        x, y = clients[k]
        if source == "gradient":
            return gradient(model, x, y, loss) + weight_decay * flat(model)
        batches = order(t, 0, k, epochs, batch_size)
        return -train(model, (x, y), batches, lr=local_lr, weight_decay=weight_decay, clip=clip, loss=loss)

    def client_curvature(model: nn.Module, k: int, v: Tensor) -> Tensor:
        """B_k v at the model's parameters, over all examples of client k."""
        x, y = clients[k]
        if curvature == "diagonal":
            return flatten(model, fisher_diagonal(model, x, y, loss)) * v
        return flatten(model, PRODUCTS[matrix](model, x, y, named(model, v), loss))

    def client_loss(model: nn.Module, k: int) -> Tensor:
        x, y = clients[k]
        w = flat(model)
        return mean_loss(model, x, y, loss).detach() + weight_decay / 2 * (w @ w)

    def cohort_mean(values: list[Tensor], cohort: Sequence[int]) -> Tensor:
        return weighted_mean(values, [weight(len(clients[k][1])) for k in cohort])

    def pair(model: nn.Module, cohort: Sequence[int], s: Tensor) -> Pair:
        bs = cohort_mean([client_curvature(model, k, s) for k in cohort], cohort)
        return s, bs + weight_decay * s + damping * s

    w = flat(module)
    pairs: list[Pair] = []
    refused = 0
    last: Tensor | None = None  # the step of the previous round
    for t, phases in rounds(cohorts):
        model = with_params(module, w)
        g = cohort_mean([client_gradient(model, t, k) for k in phases[0]], phases[0])
        if curvature_at == "next" and direction == "pairs" and last is not None:
            refused += offer(pairs, pair(model, phases[0], last), memory, floor)

        def along(damping_now: float, model=model, w=w, g=g, phases=phases) -> Tensor:
            if direction == "diagonal":
                diagonal = cohort_mean([client_curvature(model, k, torch.ones_like(w)) for k in phases[0]], phases[0])
                return -g / (diagonal + weight_decay + damping_now)
            moved = [(s, y + (damping_now - damping) * s) for s, y in pairs]
            safe = [(s, y) for s, y in moved if s @ y > floor * (s @ s)]
            return -two_loop(safe, g) if safe else -initial_step(first_step, source, g) * g

        p = along(damping)
        a = lr
        phase = 1
        if len(dampings) > 0 and (pairs or direction == "diagonal"):
            tried = [along(value) for value in dampings]
            losses = []
            for one in tried:
                there = with_params(module, w + lr * one)
                losses.append(cohort_mean([client_loss(there, k) for k in phases[1]], phases[1]).item())
            p = tried[smallest(losses)]
            phase += 1
        elif len(candidates) > 0:
            losses = []
            for candidate in candidates:
                there = with_params(module, w + lr * candidate * p)
                values = [client_loss(there, k) for k in phases[phase]]
                losses.append(cohort_mean(values, phases[phase]).item())
            a = lr * candidates[smallest(losses)]
            phase += 1

        s = a * p
        if curvature_at == "same" and direction == "pairs":
            # The diagonal came with the gradient; a product needs s, so a phase of its own.
            cohort = phases[0] if curvature == "diagonal" else phases[phase]
            refused += offer(pairs, pair(model, cohort, s), memory, floor)
        w = w + s
        last = s
    return named(module, w), refused


def initial_step(first_step: float | None, source: str, g: Tensor) -> float:
    """The step along -g while there is no pair."""
    if first_step is not None:
        return first_step
    if source == "update" or g.norm().item() <= 1:
        return 1.0
    return 1 / g.norm().item()


def smallest(losses: list[float]) -> int:
    """The place of the smallest value, the first one on ties; NaN is never smaller."""
    best, place = math.inf, 0
    for j, value in enumerate(losses):
        if value < best:
            best, place = value, j
    return place


def offer(pairs: list[Pair], pair: Pair, memory: int, floor: float) -> int:
    """Put a pair into the memory, dropping the oldest; 1 if it is refused, else 0."""
    s, y = pair
    sy, ss = s @ y, s @ s
    finite = all(torch.isfinite(value).all() for value in (s, y, sy, ss))
    if not finite or ss == 0 or sy <= floor * ss:
        return 1
    pairs.append(pair)
    while len(pairs) > memory:
        pairs.pop(0)
    return 0
