"""Who works on what: the rows that clients declared, and the jobs of a cohort."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fedge.core import Task
from fedge.ledger import Row


class Jobs(NamedTuple):
    """(client, row) pairs: client ids, row ids (0 without rows) and the row's position in what was sent; all [J]."""

    clients: Tensor
    rows: Tensor
    positions: Tensor

    def pairs(self) -> list[tuple[int, int]]:
        """The jobs as plain (client, row)."""
        return list(zip(self.clients.tolist(), self.rows.tolist(), strict=True))


class Directory:
    """The rows of every client, declared once: found by `look_up`, or told by the client itself.

    `sizes` says how many examples clients have, [C] -> [C], as far as their link knows: no more than those may weigh.
    """

    def __init__(
        self, clients: int, look_up: Callable[[int, Task], list[int]], sizes: Callable[[Tensor], Tensor]
    ) -> None:
        self.clients, self.look_up, self.sizes = clients, look_up, sizes
        self._rows: dict[int, list[int]] = {}

    def rows(self, client: int, task: Task) -> list[int]:
        if client not in self._rows:
            self._rows[client] = self.look_up(client, task)
        return self._rows[client]

    def told(self, client: int, rows: list[int]) -> None:
        """A remote client has declared its rows itself."""
        self._rows[client] = rows

    def jobs(self, clients: Tensor, task: Task, rows: tuple[int, ...] | None) -> Jobs:
        """All work of a cohort: one job per client, or one for every asked row that it holds."""
        if task.rows is None:
            zeros = torch.zeros_like(clients)
            return Jobs(clients, zeros, zeros)
        position = {row: i for i, row in enumerate(rows if rows is not None else range(task.rows))}
        found = [
            (client, row, position[row])
            for client in clients.tolist()
            for row in self.rows(client, task)
            if row in position
        ]
        table = torch.tensor(found, dtype=torch.long).view(-1, 3)
        return Jobs(table[:, 0], table[:, 1], table[:, 2])

    def declaration(self, tasks: Iterable[Task]) -> list[Row]:
        """What it costs every client to say, once and as one byte per row, which rows it holds."""
        rows = max((task.rows or 0 for task in tasks), default=0)
        return [Row(0, 0, "rows", self.clients, 0, 0, self.clients * rows)] if rows else []
