"""How the simulator comes to its way: as it was asked, as it is known, or by measuring."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fedge.core import Algorithm, Ask, At, Task
from fedge.engine.clients.directory import Jobs
from fedge.engine.hardware.budget import Budget
from fedge.engine.hardware.thread_pool import ThreadPool
from fedge.engine.links.base_link import BaseLink
from fedge.engine.recording.recorder import at_once
from fedge.engine.uploads.intake import Intake
from fedge.engine.ways import STEPS, Trial, Way, fastest
from fedge.handle import GraphHandle, Handle


class Choosing(BaseLink):
    """A link that computes clients in one of several ways, which differ by rounding alone."""

    device: torch.device
    handle: Handle
    budget: Budget
    chunk: int | None
    workers: int
    pool: ThreadPool
    _limit: int | None = None  # steps of a client, while ways are measured
    _folds: dict[Any, Any]
    _steps: dict[str, Any]

    @abstractmethod
    def make_handle(self, algorithm: Algorithm[Any]) -> Handle: ...

    @abstractmethod
    def intake(self, ask: Ask, tasks: list[Task], jobs: Jobs) -> Intake: ...

    @abstractmethod
    def _chunks(self, tasks: list[Task], jobs: Jobs) -> Any: ...

    @abstractmethod
    def _fold(self, at: At, ask: Ask, tasks: list[Task], jobs: Jobs, record: bool = True) -> Any: ...

    def _first_way(self, way: Way | None) -> Way | None:
        """What was asked for, or what is known to be fastest; None: it has to be measured."""
        self.pool = self._pool(1)
        if way is None and self.device.type == "cpu" and self.chunk is None and isinstance(self.handle, GraphHandle):
            return None
        return self._go(way or self._known())

    def _known(self) -> Way:
        """Without measuring: convolutions one by one on a CPU, everything else stacked."""
        one = self.budget.loop if self.chunk is None else self.chunk == 1
        return "single" if self.device.type == "cpu" and one else "stacked"

    def _go(self, way: Way) -> Way:
        """Workers and threads as the way wants them."""
        if way != "stacked" and self.workers > 1:
            self.pool, self.runtime.threads = self._pool(self.workers), 1
        return way

    def _pool(self, workers: int) -> ThreadPool:
        return ThreadPool(workers, lambda: self.algorithm.tasks(self.make_handle(self.algorithm)))

    def _trial(self, at: At, ask: Ask, tasks: list[Task], part: Jobs, record: bool, at_once: int) -> Trial:
        """A few steps of these clients, whose result is thrown away; `at_once` of them run side by side."""

        def run() -> None:
            done = self._fold(at, ask, tasks, part, record)
            uploads = {n: one.upload for n, t, one in zip(ask.tasks, tasks, done, strict=True) if not t.private}
            self.intake(ask, tasks, part).take(part, part.positions, uploads)

        made: Mapping[Any, Any] = self._steps if len(part.clients) == 1 else self._folds
        return Trial(run, lambda: not record or all(one.settled for one in made.values()), at_once)

    def _measured(self, at: At, ask: Ask, tasks: list[Task], jobs: Jobs) -> Way:
        """The fastest way for the first clients of this phase; of several processes all take the same."""
        if self.runtime.group.size > 1:
            return self._known()
        many = next(self._chunks(tasks, jobs))
        one = Jobs(*(leaf[:1] for leaf in many))
        self._limit = STEPS
        try:
            with at_once():
                trials: dict[Way, Trial] = {
                    "stacked": self._trial(at, ask, tasks, many, True, len(many.clients)),
                    "single": self._trial(at, ask, tasks, one, True, self.workers),
                    "plain": self._trial(at, ask, tasks, one, False, self.workers),
                }
                known = self._known()  # comes first, and wins where another way is hardly faster
                return fastest({known: trials.pop(known), **trials})
        finally:
            self._limit = None

    def _limited(self, task: Task) -> Task:
        """The task with the few steps of a trial, while ways are measured."""
        return task if self._limit is None else replace(task, batches=min(self._limit, task.batches or self._limit))
