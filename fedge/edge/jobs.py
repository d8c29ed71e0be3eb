"""Jobs that start from different versions of a model, folded in one stack.

A client's work depends on what it was sent and on its address alone, so it may be computed at any time after it was
sent out, together with whatever else is under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedge import tree
from fedge.core import Payload, Task
from fedge.engine.clients.batches import Schedule, one_client
from fedge.engine.clients.run_task import Stacked, Upload, fold_one
from fedge.engine.folding import FEW
from fedge.engine.simulator import Simulator


class Versioned(NamedTuple):
    """Jobs [J]: clients, rows, the address of each one's work; and what each was sent, [J, ...]."""

    clients: Tensor
    rows: Tensor
    keys: Tensor
    sent: Payload


class Stack:
    """Folds versioned jobs on a simulator's device, in pieces that fit into its memory."""

    def __init__(self, simulator: Simulator, names: tuple[str, ...]) -> None:
        self.simulator, self.tasks = simulator, [simulator.tasks[name] for name in names]
        self._folds: dict[int, Stacked] = {}
        self.coarse = simulator.device.type == "cuda"  # few heights, each of which is recorded once
        self._unit = 0  # heights are multiples of it

    @torch.no_grad()
    def fold(self, jobs: Versioned) -> Upload:
        """All uploads and their weights, [J, ...], in the order of the jobs."""
        found = [(piece, self._piece(_chosen(jobs, piece))) for piece in self._pieces(jobs.clients)]
        order = torch.cat([piece for piece, _ in found]).argsort()
        parts = {name: _joined([upload[name] for _, (upload, _) in found], order) for name in found[0][1][0]}
        weights = torch.cat([weight for _, (_, weight) in found])
        return parts, weights[order.to(weights.device)]

    def _pieces(self, clients: Tensor) -> Iterator[Tensor]:
        """Positions, most examples first."""
        sizes = self.simulator.population.sizes(clients)
        order = torch.from_numpy((-sizes.numpy()).argsort(kind="stable"))
        largest = int(sizes.max())
        width = max(min(task.batch_size or largest, largest) for task in self.tasks)
        most = 1 if self.simulator.loops else self.simulator.chunk or self.simulator.budget.jobs(width)
        return iter(order.split(most))

    def _padding(self, count: int) -> Tensor:
        """All positions; a coarse stack repeats the last one until its height is a multiple of the unit.

        The unit is an eighth of the first stack, which is the largest but for chance: eight heights are kept recorded.
        """
        self._unit = self._unit or (max(1, (1 << (count - 1).bit_length()) // 8) if self.coarse else 1)
        return torch.arange(-(-count // self._unit) * self._unit).clamp_(max=count - 1)

    def _piece(self, jobs: Versioned) -> Upload:
        count = len(jobs.keys)
        jobs = _chosen(jobs, self._padding(count))
        payload, uploads, weight = jobs.sent, dict[str, dict[str, Tensor]](), torch.empty(0)
        for task in self.tasks:
            raw, weight = self._one(task, jobs, payload) if len(jobs.keys) == 1 else self._many(task, jobs, payload)
            payload = payload | {name: raw[name] for name in task.keeps}
            uploads |= {} if task.private else raw
        return {name: tree.map_(lambda leaf: leaf[:count], part) for name, part in uploads.items()}, weight[:count]

    def _many(self, task: Task, jobs: Versioned, payload: Payload) -> Upload:
        simulator = self.simulator
        sizes = simulator.population.sizes(jobs.clients)
        where = simulator.device if int(sizes.sum()) * task.epochs > FEW else torch.device("cpu")
        examples = simulator.population.flat_examples(jobs.clients, where)
        if id(task) not in self._folds:
            coarse = simulator.device.type == "cuda"
            self._folds[id(task)] = Stacked(
                task, dict.fromkeys(payload, 0), simulator.compile, simulator.most, coarse=coarse
            )
        schedule = Schedule(task, examples, sizes, jobs.keys)
        return self._folds[id(task)](payload, schedule, simulator.gather, jobs.rows.to(simulator.device))

    def _one(self, task: Task, jobs: Versioned, payload: Payload) -> Upload:
        population = self.simulator.population
        x, y = population.of(int(jobs.clients[0]))
        sent = {name: tree.take(part, 0) for name, part in payload.items()}
        batches = one_client(task, x, y, int(jobs.keys[0]))
        upload, weight = fold_one(task, sent, batches, len(y), jobs.rows[0].to(self.simulator.device))
        return {name: tree.map_(lambda leaf: leaf[None], part) for name, part in upload.items()}, weight[None]


def _chosen(jobs: Versioned, piece: Tensor) -> Versioned:
    sent = {name: tree.map_(lambda leaf: leaf[piece.to(leaf.device)], part) for name, part in jobs.sent.items()}
    return Versioned(jobs.clients[piece], jobs.rows[piece], jobs.keys[piece], sent)


def _joined(parts: list[dict[str, Tensor]], order: Tensor) -> dict[str, Tensor]:
    return tree.map_(lambda *leaves: torch.cat(leaves)[order.to(leaves[0].device)], *parts)
