"""Algorithms against client drift: SCAFFOLD, FedProx and FedNova, each one plain loop over torch.optim.SGD."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .common import (
    Client,
    Cohorts,
    Order,
    Params,
    Weight,
    by_examples,
    flat,
    flatten,
    mean_loss,
    named,
    rounds,
    weighted_mean,
    with_params,
)
from .spectral import server_step

Extra = Callable[[Tensor], Tensor]  # flat parameters -> what is added to the flat gradient


def train(
    module: nn.Module,
    client: Client,
    batches: list[Tensor],
    extra: Extra,
    *,
    lr: float,
    factor: float = 1.0,
    inner_decay: float = 1.0,
    clip: float | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> tuple[Tensor, list[float]]:
    """w_k - w, flat, and the size of every step."""
    local, (x, y) = copy.deepcopy(module), client
    params = list(local.parameters())
    rule = torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay)
    sizes = []
    for i, batch in enumerate(batches):
        rule.zero_grad()
        mean_loss(local, x[batch], y[batch]).backward()
        for param, piece in zip(params, named(local, extra(flat(local))).values(), strict=True):
            param.grad += piece
        if clip is not None:
            nn.utils.clip_grad_norm_(params, clip)
        sizes.append(lr * factor * (1 - (1 - inner_decay) * i / max(1, len(batches) - 1)))
        rule.param_groups[0]["lr"] = sizes[-1]
        rule.step()
    return flat(local) - flat(module), sizes


def scaffold(
    module: nn.Module,
    clients: list[Client],
    cohorts: Cohorts,
    order: Order,
    *,
    epochs: int,
    batch_size: int | None,
    total: int | None,
    lr_decay: float = 1.0,
    server_lr: float = 1.0,
    server_momentum: float = 0.0,
    spectral: bool = False,
    weight: Weight = lambda n: 1.0,
    control: str = "sum",
    **options: float,
) -> Params:
    """The server's control is recomputed from its meaning: the mean of all controls, or one that moves to the cohort's.

    `total` is the number of clients, None: those seen so far are all there are.
    """
    w = flat(module)
    controls: dict[int, Tensor] = {}
    c, m = torch.zeros_like(w), torch.zeros_like(w)
    for t, phases in rounds(cohorts):
        deltas, weights, after = [], [], dict(controls)
        for k in phases[0]:
            own = controls.get(k, torch.zeros_like(w))
            batches = order(t, 0, k, epochs, batch_size)
            model = with_params(module, w)
            extra: Extra = lambda _, by=c - own: by  # noqa: E731
            delta, sizes = train(model, clients[k], batches, extra, factor=lr_decay**t, **options)
            after[k] = own - c - delta / sum(sizes)
            deltas.append(delta)
            weights.append(weight(len(clients[k][1])))
        controls, m = after, server_momentum * m - weighted_mean(deltas, weights)
        if spectral:
            pieces = named(module, m)
            moved = server_step(list(pieces.values()), server_momentum, server_lr)
            w = w - flatten(module, dict(zip(pieces, moved, strict=True)))
        else:
            w = w - server_lr * m
        masses = {k: weight(len(clients[k][1])) for k in controls}
        mass = sum(masses.values()) if total is None else total
        if control == "sum":
            c = sum(masses[k] * own for k, own in controls.items()) / mass
        else:
            here = sum(masses[k] for k in phases[0])
            c = c + here / mass * (sum(masses[k] * controls[k] for k in phases[0]) / here - c)
    return named(module, w)


def fedprox(
    module: nn.Module,
    clients: list[Client],
    cohorts: Cohorts,
    order: Order,
    *,
    mu: float,
    epochs: int,
    batch_size: int | None,
    lr_decay: float = 1.0,
    server_lr: float = 1.0,
    server_momentum: float = 0.0,
    weight: Weight = by_examples,
    **options: float,
) -> Params:
    w = flat(module)
    m = torch.zeros_like(w)
    for t, phases in rounds(cohorts):
        deltas = []
        for k in phases[0]:
            batches, model = order(t, 0, k, epochs, batch_size), with_params(module, w)
            pull: Extra = lambda at, w=w: mu * (at - w)  # noqa: E731
            deltas.append(train(model, clients[k], batches, pull, factor=lr_decay**t, **options)[0])
        m = server_momentum * m + weighted_mean(deltas, [weight(len(clients[k][1])) for k in phases[0]])
        w = w + server_lr * m
    return named(module, w)


def coefficients(sizes: list[float], momentum: float) -> list[float]:
    """How much of each gradient is in w - w_k: gradient j is in steps j, j + 1, ..., times rho^0, rho^1, ..."""
    return [sum(size * momentum**i for i, size in enumerate(sizes[j:])) for j in range(len(sizes))]


def fednova(
    module: nn.Module,
    clients: list[Client],
    cohorts: Cohorts,
    order: Order,
    *,
    epochs: int,
    batch_size: int | None,
    lr_decay: float = 1.0,
    momentum: float = 0.0,
    server_lr: float = 1.0,
    server_momentum: float = 0.0,
    weight: Weight = by_examples,
    **options: float,
) -> Params:
    w = flat(module)
    m = torch.zeros_like(w)
    for t, phases in rounds(cohorts):
        directions, lengths = [], []
        for k in phases[0]:
            batches, model = order(t, 0, k, epochs, batch_size), with_params(module, w)
            delta, sizes = train(
                model, clients[k], batches, torch.zeros_like, momentum=momentum, factor=lr_decay**t, **options
            )
            lengths.append(sum(coefficients(sizes, momentum)))
            directions.append(-delta / lengths[-1])
        weights = [weight(len(clients[k][1])) for k in phases[0]]
        effective = sum(n * length for n, length in zip(weights, lengths, strict=True)) / sum(weights)
        m = server_momentum * m + effective * weighted_mean(directions, weights)
        w = w - server_lr * m
    return named(module, w)
