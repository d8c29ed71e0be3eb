"""FedPer (Arivazhagan et al. 2019): every client has its own copy of the personal layers."""

import torch
from torch import Tensor, nn

from .common import Client, Cohorts, Order, Params, flat, named, rounds, weighted_mean, with_params
from .drift import train


def accuracy(module: nn.Module, client: Client) -> float:
    x, y = client
    with torch.no_grad():
        return float((module(x).argmax(1) == y).double().mean())


def fedper(
    module: nn.Module,
    clients: list[Client],
    cohorts: Cohorts,
    order: Order,
    personal: list[str],
    *,
    epochs: int,
    batch_size: int | None,
    lr_decay: float = 1.0,
    server_lr: float = 1.0,
    **options: float,
) -> tuple[Params, list[Tensor], list[list[float]]]:
    """The server's parameters, every client's own network, and the accuracies of every round's cohort."""
    own = torch.cat([torch.full((p.numel(),), name in personal) for name, p in module.named_parameters()])
    w = flat(module)
    networks = [w.clone() for _ in clients]
    judged: list[list[float]] = []
    for t, phases in rounds(cohorts):
        deltas, judged = [], [*judged, []]
        for k in phases[0]:
            here = with_params(module, torch.where(own, networks[k], w))
            judged[-1].append(accuracy(here, clients[k]))
            batches = order(t, 0, k, epochs, batch_size)
            delta = train(here, clients[k], batches, torch.zeros_like, factor=lr_decay**t, **options)[0]
            networks[k] = flat(here) + delta
            deltas.append(delta)
        mean = weighted_mean(deltas, [len(clients[k][1]) for k in phases[0]])
        w = torch.where(own, w, w + server_lr * mean)
    return named(module, w), networks, judged
