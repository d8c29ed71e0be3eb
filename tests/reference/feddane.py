"""FedDANE (Li et al. 2019): local steps on a gradient-corrected, proximal surrogate."""

import copy

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
    gradient,
    mean_loss,
    named,
    rounds,
    weighted_mean,
    with_params,
)


def solve(
    module: nn.Module,
    client: Client,
    batches: list[Tensor],
    g: Tensor,
    *,
    lr: float,
    mu: float,
    clip: float | None = None,
    inner_decay: float = 1.0,
    loss: Loss | None,
) -> Tensor:
    """w_k - w_t after SGD on F_k(w) + <g - grad F_k(w_t), w - w_t> + mu/2 ||w - w_t||^2."""
    x, y = client
    start = flat(module)
    correction = g - gradient(module, x, y, loss)
    local = copy.deepcopy(module)
    rule = torch.optim.SGD(local.parameters(), lr=lr)
    for i, batch in enumerate(batches):
        rule.param_groups[0]["lr"] = lr * (1 - (1 - inner_decay) * i / max(1, len(batches) - 1))
        rule.zero_grad()
        # Not `flat`: the surrogate is differentiated through this vector.
        moved = torch.cat([param.reshape(-1) for param in local.parameters()]) - start
        surrogate = mean_loss(local, x[batch], y[batch], loss)
        surrogate = surrogate + correction @ moved + mu / 2 * (moved @ moved)
        surrogate.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(local.parameters(), clip)
        rule.step()
    return flat(local) - start


def feddane(
    module: nn.Module,
    clients: list[Client],
    cohorts: Cohorts,
    order: Order,
    *,
    lr: float,
    epochs: int,
    batch_size: int | None,
    mu: float,
    clip: float | None = None,
    inner_decay: float = 1.0,
    weight: Weight = by_examples,
    loss: Loss | None = None,
) -> Params:
    """Phase 0 averages full local gradients, phase 1 the local solutions."""
    w = flat(module)
    for t, phases in rounds(cohorts):
        model = with_params(module, w)

        grads, weights = [], []
        for k in phases[0]:
            x, y = clients[k]
            grads.append(gradient(model, x, y, loss))
            weights.append(weight(len(y)))
        g = weighted_mean(grads, weights)

        deltas, weights = [], []
        for k in phases[1]:
            batches = order(t, 1, k, epochs, batch_size)
            options = {"lr": lr, "mu": mu, "clip": clip, "inner_decay": inner_decay}
            deltas.append(solve(model, clients[k], batches, g, **options, loss=loss))
            weights.append(weight(len(clients[k][1])))
        w = w + weighted_mean(deltas, weights)
    return named(module, w)
