"""One worker per core: single jobs side by side, each on one thread.

A batch of one client is too small to be shared by several threads, so the clients are. Results come back in the order
of the jobs, whoever was faster: sums do not depend on the number of workers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from fedge.core import Task

T = TypeVar("T")
Tasks = Mapping[str, Task]


class ThreadPool:
    """Threads that each have tasks of their own, because a module is not safe to share."""

    def __init__(self, workers: int, make_tasks: Callable[[], Tasks]) -> None:
        self.workers, self.make_tasks = workers, make_tasks
        self._own = threading.local()
        self._pool: ThreadPoolExecutor | None = None

    def map(self, work: Callable[[T, Tasks], Any], jobs: Iterable[T]) -> Iterator[tuple[T, Any]]:
        """(job, work(job, tasks)) in the order of the jobs, with a few of them under way."""
        if self._pool is None:
            tasks = SimpleQueue[Tasks]()
            for _ in range(self.workers):  # here, one after another: torch patches all modules while it traces one
                tasks.put(self.make_tasks())
            self._pool = ThreadPoolExecutor(self.workers, "fedge", initializer=_begin, initargs=(self._own, tasks))
        waiting: deque[tuple[T, Future[Any]]] = deque()
        try:
            for job in jobs:
                waiting.append((job, self._pool.submit(self._one, work, job)))
                if len(waiting) > 2 * self.workers:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        finally:
            for _, future in waiting:
                future.cancel()

    def _one(self, work: Callable[[T, Tasks], Any], job: T) -> Any:
        with torch.no_grad():
            return work(job, self._own.tasks)


def _begin(own: threading.local, tasks: SimpleQueue[Tasks]) -> None:
    """A thread keeps its target alive: if that were the pool itself, the pool could never be collected."""
    torch.set_num_threads(1)
    own.tasks = tasks.get()
