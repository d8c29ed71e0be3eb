"""How much arithmetic a round is, whoever does it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from fedge.algorithms import FedAvg, FedOVA
from fedge.core import Algorithm
from fedge.federation import Federation


def flops(algorithm: Algorithm[Any], federation: Federation, cohort: int) -> int | None:
    """Multiplications and additions of the matrix products in a round of the first `cohort` clients.

    Every visit of an example is one pass forwards and one backwards; None for algorithms with other client work.
    """
    inner = algorithm.inner if isinstance(algorithm, FedOVA) else algorithm
    if not isinstance(inner, FedAvg):
        return None
    visits = 0
    for client in range(cohort):
        labels = federation.data.train_y[federation.examples(client)]
        jobs = len(labels.unique()) if isinstance(algorithm, FedOVA) else 1
        visits += jobs * inner.epochs * len(labels)
    return visits * _one_visit(inner.model, federation)


def _one_visit(model: torch.nn.Module, federation: Federation) -> int:
    x = federation.data.train_x[:1].cpu()
    x = x.float() if x.is_floating_point() else x
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(x), torch.zeros(1, dtype=torch.long)).backward()
    model.zero_grad()
    return int(counter.get_total_flops())
