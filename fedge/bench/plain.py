"""The plain loop that everything is compared with: nn.Module and torch.optim, one client after another."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedge.algorithms import FedAvg, FedOVA
from fedge.core import Algorithm
from fedge.federation import Federation


def plain_round(algorithm: Algorithm[Any], federation: Federation, clients: Tensor, device: torch.device) -> Any:
    """A function that does one round's client work and mean, as a careful person would write it by hand."""
    binary = isinstance(algorithm, FedOVA)
    inner = algorithm.inner if isinstance(algorithm, FedOVA) else algorithm
    if not isinstance(inner, FedAvg):
        return None
    data = federation.data
    x, y = data.train_x.to(device), data.train_y.to(device)
    start = copy.deepcopy(inner.model).to(device)
    work = []
    for client in clients.tolist():
        chosen = federation.examples(client).to(device)
        for label in y[chosen].unique().tolist() if binary else [None]:
            target = y[chosen] if label is None else (y[chosen] == label).long()
            work.append((x[chosen], target))
    return lambda: _round(start, work, inner)


def _round(start: nn.Module, work: list[tuple[Tensor, Tensor]], algorithm: FedAvg) -> list[Tensor]:
    total = [torch.zeros_like(p) for p in start.parameters()]
    for x, y in work:
        model = copy.deepcopy(start)
        for layer in model.modules():
            if isinstance(layer, nn.RNNBase):
                layer.flatten_parameters()  # a copy's weights lie apart, which cuDNN is slower with
        _client(model, x, y, algorithm)
        with torch.no_grad():
            torch._foreach_add_(total, list(model.parameters()), alpha=len(y))
    return total


def _client(model: nn.Module, x: Tensor, y: Tensor, algorithm: FedAvg) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=algorithm.lr)
    for _ in range(algorithm.epochs):
        for batch in torch.randperm(len(y), device=y.device).split(algorithm.batch_size or len(y)):
            optimiser.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimiser.step()
