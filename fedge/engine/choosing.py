"""How the simulator comes to its way: as it was asked, as it is known, or by measuring."""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from fedge.core import Algorithm, Ask, At, Task
from fedge.engine.clients.directory import Directory, Jobs
from fedge.engine.hardware.budget import Budget
from fedge.engine.hardware.thread_pool import ThreadPool
from fedge.engine.links.base_link import BaseLink
from fedge.engine.uploads.intake import Intake
from fedge.engine.ways import CLEAR, SLICE, STEPS, Trial, Way, fastest
from fedge.handle import GraphHandle, Handle, WrittenHandle
from fedge.handle.probe import mixes

log = logging.getLogger("fedge")

SHARE = 1 / 20  # of a run, that the choice of a way may cost
Steps = dict[str, Any]  # by task, each with its recordings


class Choosing(BaseLink):
    """A link that computes clients in one of several ways, which differ by rounding alone."""

    device: torch.device
    handle: Handle
    budget: Budget
    chunk: int | None
    workers: int
    pool: ThreadPool
    directory: Directory
    rounds: int | None  # of the run, if that is known
    _round: int | None = None
    _begun: int = 0  # rounds that this link has begun
    _share: float = 1.0  # of a phase's steps, those that are taken where they may be recorded
    _limit: int | None = None  # steps of a client, while ways are measured
    _folds: dict[Any, Any]
    _steps: Steps

    @property
    @abstractmethod
    def _has_layers(self) -> bool: ...

    @abstractmethod
    def make_handle(self, algorithm: Algorithm[Any]) -> Handle: ...

    @abstractmethod
    def intake(self, ask: Ask, tasks: list[Task], jobs: Jobs) -> Intake: ...

    @abstractmethod
    def _chunks(self, tasks: list[Task], jobs: Jobs) -> Any: ...

    @abstractmethod
    def _fold(self, at: At, ask: Ask, tasks: list[Task], jobs: Jobs, record: bool = True) -> Any: ...

    def _first_way(self, way: Way | None) -> Way | None:
        """What was asked for, or what is known to be fastest; None: it has to be measured.

        Of a large chain it is not known whether threads are better within its products or side by side, nor whether
        large linear layers had better be stacked or, one client after another, be computed in C.
        """
        self.pool = self._pool(1)
        if way in (None, "stacked") and self._mixes():
            way = way or self._alone()
        large = (self.runtime.threads > 1 or self._has_layers) and not self.budget.loop
        unclear = isinstance(self.handle, GraphHandle) or large
        if way is None and self.device.type == "cpu" and self.chunk is None and unclear:
            return None
        return self._go(way or self._known())

    def _mixes(self) -> bool:
        """Whether the model mixes the examples of a batch; said once per link."""
        if isinstance(self.handle, WrittenHandle):  # layers that are known not to
            return False
        params = {name: leaf.detach() for name, leaf in self.handle.module.named_parameters()}
        if found := mixes(self.handle, params, self.runtime.x):
            log.warning(
                "the model's output for an example depends on the others of its batch: test scores depend on who is "
                "judged together, and the padding of clients that are computed at once changes the result (on a CPU "
                "way='single' computes them one after another; without a way it is taken)"
            )
        return found

    def _alone(self) -> Way | None:
        """One client after another, whose batches are not padded, where that is possible."""
        return "single" if self.device.type == "cpu" and self.chunk in (None, 1) else None

    def _known(self) -> Way:
        """Without measuring: convolutions one by one on a CPU, everything else stacked."""
        one = self.budget.loop if self.chunk is None else self.chunk == 1
        return "single" if self.device.type == "cpu" and one else "stacked"

    def _go(self, way: Way) -> Way:
        """Workers and threads as the way wants them."""
        if way != "stacked" and self.workers > 1:
            self.runtime.threads = 1
            if self.pool.workers != self.workers:
                self.pool = self._pool(self.workers)
        return way

    def _pool(self, workers: int) -> ThreadPool:
        return ThreadPool(workers, lambda: self.algorithm.tasks(self.make_handle(self.algorithm)))

    def _together(self, at: At, ask: Ask, tasks: list[Task], part: Jobs) -> Trial:
        """A few steps of these clients, stacked."""

        def run() -> None:
            self._taken(ask, tasks, part, self._fold(at, ask, tasks, part))

        return Trial(run, lambda: all(one.settled for one in self._folds.values()), len(part.clients), self._clock)

    def _apart(self, at: At, ask: Ask, tasks: list[Task], one: Jobs, steps: Steps, record: bool, jobs: int) -> Trial:
        """A few steps of a client, as often as workers would take clients side by side in a phase of `jobs`.

        What workers gain depends on the model: of one with short operations they do hardly more than one thread.
        """
        shared = 1 < self.workers <= jobs
        count = min(jobs, 2 * self.workers) if shared else 1

        def settled() -> bool:
            return not record or (bool(steps) and all(one.settled for one in steps.values()))

        def work(part: Jobs, own: Mapping[str, Task]) -> Any:
            return self._fold(at, ask, [own[name] for name in ask.tasks], part, record=False)

        def run() -> None:
            with self._as_workers(steps):
                if not shared or not settled():  # workers record nothing
                    self._taken(ask, tasks, one, self._fold(at, ask, tasks, one, record))
                if shared:
                    for part, done in self.pool.map(work, [one] * count):
                        self._taken(ask, tasks, part, done)

        return Trial(run, settled, count, self._clock)

    @property
    def _clock(self) -> Callable[[], float]:
        """What ways are timed by: other work on the machine does not count for a run of one thread."""
        return time.process_time if self.workers == torch.get_num_threads() == 1 else time.perf_counter

    @contextmanager
    def _as_workers(self, steps: Steps) -> Iterator[None]:
        """Within it, recordings of steps are these, and torch has the threads that it has beside workers."""
        before, threads = self._steps, torch.get_num_threads()
        self._steps = steps
        if self.workers > 1:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            self._steps = before
            torch.set_num_threads(threads)

    def _taken(self, ask: Ask, tasks: list[Task], part: Jobs, done: list[Any]) -> None:
        """The server's share of a trial."""
        uploads = {n: one.upload for n, t, one in zip(ask.tasks, tasks, done, strict=True) if not t.private}
        self.intake(ask, tasks, part).take(part, part.positions, uploads)

    def _measured(self, at: At, ask: Ask, tasks: list[Task], jobs: Jobs) -> Way:
        """The fastest way for the first clients of this phase; of several processes all take the same."""
        if self.runtime.group.size > 1:
            return self._known()
        many = Jobs(*(leaf[:SLICE] for leaf in next(self._chunks(tasks, jobs))))
        one, count = Jobs(*(leaf[:1] for leaf in many)), len(jobs.clients)
        recorded: Steps = {}
        self._limit, self.pool = STEPS, self._pool(self.workers)
        try:
            trials: dict[Way, Trial] = {
                "stacked": self._together(at, ask, tasks, many),
                "single": self._apart(at, ask, tasks, one, recorded, True, count),
                "plain": self._apart(at, ask, tasks, one, {}, False, count),
            }
            known = self._known()  # comes first, and wins where another way is hardly faster
            clear = CLEAR / min(self.workers, count) ** 0.5  # recorded, workers side by side may gain more than plain
            way = fastest({known: trials.pop(known), **trials}, clear, lambda s: self._allowed(s, tasks, jobs))
        finally:
            self._limit = None
        if way == "stacked":
            self.pool = self._pool(1)
        else:
            self._folds = {}
        self._steps = recorded if way == "single" else {}
        return way

    def _allowed(self, seconds: float, tasks: list[Task], jobs: Jobs) -> float:
        """Seconds that a choice may take: one round of such clients, or a twentieth of the run."""
        if self.rounds is None or self.device.type != "cpu":  # a GPU launches what is recorded as a whole
            return math.inf
        sizes = self.directory.sizes(jobs.clients).tolist()
        steps = sum(task.steps(size) for task in tasks for size in sizes)
        few = sum(min(STEPS, task.steps(max(sizes))) for task in tasks)
        return seconds * steps / few * max(1.0, SHARE * self.rounds)

    def _ahead(self) -> float:
        """How many times as long as what went before the rest of the run is; infinite if that is not known.

        What is saved counts for all steps, also those that workers take side by side, who record nothing.
        """
        if self.rounds is None or self.device.type != "cpu":  # a GPU launches what is recorded as a whole
            return math.inf
        return max(0, self.rounds - self._begun) / max(1, self._begun) / self._share

    def _limited(self, task: Task) -> Task:
        """The task with the few steps of a trial, while ways are measured."""
        return task if self._limit is None else replace(task, batches=min(self._limit, task.batches or self._limit))
