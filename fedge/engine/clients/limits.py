"""Clients that do less than a whole task: how many steps each may do, and jobs in the order that a stack wants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedge import tree
from fedge.core import Ask, Payload, Task
from fedge.engine.clients.directory import Jobs
from fedge.engine.clients.run_task import Upload

NEVER = 1 << 62  # steps: no limit


def steps_at_most(ask: Ask, position: int, clients: Tensor) -> NDArray[Any] | None:
    """The steps that each of these clients may do of the task at a position of the ask; None: all of them all."""
    if ask.limits is None:
        return None
    limits = (ask.limits.get(client) for client in clients.tolist())
    found = np.array([NEVER if limit is None else limit[position] for limit in limits])
    if (found < 1).any():
        raise ValueError(f"a client is to do {found.min()} steps of '{ask.tasks[position]}': at least 1 is needed")
    return found


def of_clients(most: NDArray[Any], slots: Tensor) -> NDArray[Any]:
    """Limits of jobs as those of their clients."""
    first = np.unique(slots.numpy(), return_index=True)[1]
    found: NDArray[Any] = most[first]
    return found


@dataclass(frozen=True)
class Order:
    """A stack's jobs, most steps first; jobs of one client stay together."""

    ahead: NDArray[Any]

    def jobs(self, jobs: Jobs) -> Jobs:
        there = torch.from_numpy(self.ahead)
        return Jobs(*(part[there] for part in jobs))

    def some(self, leaf: Tensor | None) -> Tensor | None:
        return None if leaf is None else leaf[torch.from_numpy(self.ahead).to(leaf.device)]

    def take(self, payload: Payload, dims: dict[str, int | None]) -> Payload:
        """What was sent, in this order where it has a job axis."""
        return {name: part if dims[name] is None else self._moved(part, self.ahead) for name, part in payload.items()}

    def back(self, upload: Upload) -> Upload:
        """Uploads in the order that the jobs had before."""
        again = self.ahead.argsort(kind="stable")
        parts = {name: self._moved(part, again) for name, part in upload[0].items()}
        return parts, upload[1][torch.from_numpy(again).to(upload[1].device)]

    @staticmethod
    def _moved(part: dict[str, Tensor], order: NDArray[Any]) -> dict[str, Tensor]:
        there = torch.from_numpy(order)
        return tree.map_(lambda leaf: leaf.index_select(0, there.to(leaf.device)), part)


def by_steps(task: Task, sizes: Tensor, most: NDArray[Any]) -> Order:
    """The order of a stack in which those still at work come first."""
    known = {n: task.steps(n) for n in set(sizes.tolist())}
    steps = np.minimum([known[n] for n in sizes.tolist()], most)
    return Order((-steps).argsort(kind="stable"))
