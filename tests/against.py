"""The bridge to tests/reference: the same clients, cohorts and batches, for a loop that knows nothing of fedge."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fedge
from fedge.core import At, Task
from fedge.engine.clients.batches import client_key, one_client
from fedge.loop import cohorts as draws


def clients_of(federation: fedge.Federation) -> list[tuple[Tensor, Tensor]]:
    data = federation.data
    lists = [federation.examples(k) for k in range(federation.clients)]
    return [(data.train_x[chosen], data.train_y[chosen]) for chosen in lists]


def cohorts_of(
    federation: fedge.Federation, rounds: int, cohort: int, seed: int, fresh: tuple[bool, ...] = (True,)
) -> list[list[list[int]]]:
    """cohorts[t][p]; `fresh` says which phases draw a new cohort."""
    draw = draws(federation.clients, cohort)
    table: list[list[list[int]]] = []
    for t in range(rounds):
        phases: list[list[int]] = []
        for p, new in enumerate(fresh):
            phases.append(draw(At(seed, t + 1, p)).tolist() if new else phases[-1])
        table.append(phases)
    return table


def order_of(federation: fedge.Federation, seed: int) -> Callable[..., list[Tensor]]:
    """order(t, p, k, epochs, batch_size) -> the index tensors of client k's batches."""

    def order(t: int, p: int, k: int, epochs: int, batch_size: int | None) -> list[Tensor]:
        task = Task(None, None, None, epochs, batch_size)  # type: ignore[arg-type]
        positions = torch.arange(len(federation.examples(k)))
        key = client_key(At(seed, t + 1, p), k)
        return [batch.x for batch in one_client(task, positions, positions, key)]

    return order
