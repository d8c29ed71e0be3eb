"""FedAvg (McMahan et al. 2017) with a server optimiser (Reddi et al. 2021)."""

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
    mean_loss,
    named,
    rounds,
    weighted_mean,
    with_params,
)


def train(
    module: nn.Module,
    client: Client,
    batches: list[Tensor],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    optimiser: str = "sgd",
    clip: float | None = None,
    loss: Loss | None = None,
) -> Tensor:
    """w_k - w: what a client's local steps over the batches add to the parameters, flat."""
    local = copy.deepcopy(module)
    params = list(local.parameters())
    if optimiser == "sgd":
        rule = torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay)
    elif optimiser == "adam":
        rule = torch.optim.Adam(params, lr=lr, weight_decay=weight_decay)
    else:
        raise ValueError(optimiser)
    x, y = client
    for batch in batches:
        rule.zero_grad()
        mean_loss(local, x[batch], y[batch], loss).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(params, clip)
        rule.step()
    return flat(local) - flat(module)


def fedavg(
    module: nn.Module,
    clients: list[Client],
    cohorts: Cohorts,
    order: Order,
    *,
    lr: float,
    epochs: int,
    batch_size: int | None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    optimiser: str = "sgd",
    clip: float | None = None,
    server_lr: float = 1.0,
    server_momentum: float = 0.0,
    server_optimiser: str = "sgd",
    server_betas: tuple[float, float] = (0.9, 0.99),
    server_eps: float = 1e-3,
    weight: Weight = by_examples,
    loss: Loss | None = None,
) -> Params:
    """Local training in every round; the server's gradient is minus the mean of w_k - w."""
    w = nn.Parameter(flat(module))
    if server_optimiser == "sgd":
        server = torch.optim.SGD([w], lr=server_lr, momentum=server_momentum)
    elif server_optimiser == "adam":
        server = torch.optim.Adam([w], lr=server_lr, betas=server_betas, eps=server_eps)
    else:
        raise ValueError(server_optimiser)
    for t, phases in rounds(cohorts):
        model = with_params(module, w.detach())
        deltas, weights = [], []
        for k in phases[0]:
            delta = train(
                model,
                clients[k],
                order(t, 0, k, epochs, batch_size),
                lr=lr,
                momentum=momentum,
                weight_decay=weight_decay,
                optimiser=optimiser,
                clip=clip,
                loss=loss,
            )
            deltas.append(delta)
            weights.append(weight(len(clients[k][1])))
        w.grad = -weighted_mean(deltas, weights)
        server.step()
    return named(module, w.detach())
