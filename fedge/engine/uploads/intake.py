"""Uploads of a chunk of jobs, checked and taken in: merged at once, or kept until all are there."""

from __future__ import annotations

import math
from bisect import insort
from typing import NamedTuple

import torch
from torch import Tensor

from fedge import tree
from fedge.core import Ask, Drop, Payload, Task
from fedge.engine.clients.directory import Jobs
from fedge.engine.clients.memory import Job
from fedge.engine.clients.run_task import Upload
from fedge.engine.uploads import checks
from fedge.engine.uploads.coding import is_coded
from fedge.engine.uploads.limits import Limits
from fedge.engine.uploads.stacking import Stack
from fedge.engine.uploads.streaming import Sums

Total = Sums | Stack
Refused = tuple[list[Drop], list[Job]]  # who was dropped and why, and the jobs
MAX_RATIO = 1000.0
FIRST, SURE = 3, 16.0  # uploads before a median says anything; how far it may still move


def new_total(ask: Ask, task: Task) -> Total:
    """What takes in the uploads of an ask."""
    rows = None if task.rows is None else len(ask.rows or range(task.rows))
    return Sums(ask.combine, rows) if ask.combine.streams else Stack(ask.combine, rows)


class Held(NamedTuple):
    """Jobs whose uploads wait until the whole cohort's are known."""

    jobs: Jobs
    positions: Tensor
    uploads: dict[str, Upload]
    sizes: list[list[float]]  # by task, by job


class Intake:
    """Takes in uploads chunk by chunk; one that is far larger than the cohort's median is held back, then dropped.

    The size of an upload is its largest magnitude, over parts of at least 64 numbers. More than `max_ratio` times the
    median of all uploads of the ask is refused: one client can then not make the model overflow. Uploads that may turn
    out to be so, and the first few, are held until all are there, so the outcome does not depend on the order.
    """

    def __init__(self, ask: Ask, task: Task, limits: Limits, max_ratio: float | None) -> None:
        self.total, self.limits, self.max_ratio = new_total(ask, task), limits, max_ratio
        self._sizes: list[list[float]] = []  # by task, ascending
        self._held: list[Held] = []
        if ask.combine.bounds:
            self.max_ratio = None

    def take(self, jobs: Jobs, positions: Tensor, uploads: dict[str, Upload]) -> Refused:
        if not uploads:  # private tasks alone
            return [], []
        if self.max_ratio is None or not any(_large(upload) for upload, _ in uploads.values()):
            return add_good(self.total, jobs, positions, uploads, self.limits)
        sizes = [_sizes(upload) for upload, _ in uploads.values()]
        self._note(sizes)
        doubt = [self._doubtful(job) for job in zip(*sizes, strict=True)]
        if not any(doubt):
            return add_good(self.total, jobs, positions, uploads, self.limits)
        self._held.append(_chosen(Held(jobs, positions, uploads, sizes), doubt))
        rest = _chosen(Held(jobs, positions, uploads, sizes), [not one for one in doubt])
        return self._add(rest)

    def close(self) -> Refused:
        """What was held back, now that all is known."""
        dropped, bad = list[Drop](), list[Job]()
        for held in self._held:
            reasons = [self._reason(job) for job in zip(*held.sizes, strict=True)]
            names = list(held.uploads)
            for (client, row), reason in zip(held.jobs.pairs(), reasons, strict=True):
                if reason is not None:
                    dropped.append(Drop(client, names[reason[0]], reason[1]))
                    bad.append((client, row))
            more = self._add(_chosen(held, [reason is None for reason in reasons]))
            dropped, bad = dropped + more[0], bad + more[1]
        return dropped, bad

    def _add(self, some: Held) -> Refused:
        if not len(some.jobs.clients):
            return [], []
        return add_good(self.total, some.jobs, some.positions, some.uploads, self.limits)

    def _note(self, sizes: list[list[float]]) -> None:
        self._sizes = self._sizes or [[] for _ in sizes]
        for known, new in zip(self._sizes, sizes, strict=True):
            for size in new:
                if math.isfinite(size):
                    insort(known, size)

    def _doubtful(self, job: tuple[float, ...]) -> bool:
        assert self.max_ratio is not None
        few = len(self._sizes[0]) < FIRST if self._sizes else True
        return few or any(
            math.isfinite(size) and size * SURE > self.max_ratio * _median(known)
            for size, known in zip(job, self._sizes, strict=True)
        )

    def _reason(self, job: tuple[float, ...]) -> tuple[int, str] | None:
        """Of which task an upload is too large, and how; None if it is not."""
        assert self.max_ratio is not None
        for task, (size, known) in enumerate(zip(job, self._sizes, strict=True)):
            usual = _median(known)
            if math.isfinite(size) and usual and size > self.max_ratio * usual:
                return task, f"its largest number is {size:.3g}, over {self.max_ratio:g} times the usual {usual:.3g}"
        return None


def _sizes(upload: Payload) -> list[float]:
    """The largest magnitude in the large parts of every job's upload."""
    leaves = _large(upload)
    if not leaves:
        return [0.0] * len(next(iter(next(iter(upload.values())).values()))) if upload else []
    found: list[float] = torch.stack([checks.largest(leaf) for leaf in leaves]).amax(0).tolist()
    return found


def _large(upload: Payload) -> list[Tensor]:
    return [leaf for part in upload.values() if is_coded(tree.take(part, 0)) for leaf in part.values()]


def _median(ordered: list[float]) -> float:
    count = len(ordered)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2 if count else 0.0


def _chosen(some: Held, flags: list[bool]) -> Held:
    if all(flags):
        return some
    index = torch.tensor([place for place, flag in enumerate(flags) if flag], dtype=torch.long)
    there = index.to(some.positions.device)
    uploads = {
        name: ({n: tree.take(p, there) for n, p in upload.items()}, weight[there])
        for name, (upload, weight) in some.uploads.items()
    }
    sizes = [[size for size, flag in zip(one, flags, strict=True) if flag] for one in some.sizes]
    return Held(Jobs(*(column[index] for column in some.jobs)), some.positions[there], uploads, sizes)


def add(total: Total, uploads: list[Upload], positions: Tensor, clients: Tensor) -> None:
    """Good uploads, one per task, all with a leading job axis."""
    payloads, weights = [payload for payload, _ in uploads], [weight for _, weight in uploads]
    if isinstance(total, Sums):
        total.merge(total.part(payloads, weights, positions))
    else:
        total.add(payloads, weights, positions, clients)


def add_good(total: Total, jobs: Jobs, positions: Tensor, uploads: dict[str, Upload], limits: Limits) -> Refused:
    """Take in the uploads of these jobs, without those that fail a check; returns who failed, mostly nobody."""
    most = [limits.most(name, jobs).to(positions.device) for name in uploads]
    counted = [(upload, limits.counted(name, w, positions)) for name, (upload, w) in uploads.items()]
    if isinstance(total, Sums):
        part = total.part([payload for payload, _ in counted], [weight for _, weight in counted], positions)
        if bool(checks.weights_fit([weight for _, weight in uploads.values()], most) & part.finite()):
            total.merge(part)
            return [], []
    passed, dropped = _check(jobs, uploads, most)
    good = passed.nonzero().flatten()
    if len(good):
        chosen = [_select(upload, good, len(dropped)) for upload in counted]
        add(total, chosen, positions[good], jobs.clients[good.cpu()])
    return dropped, [job for job, fine in zip(jobs.pairs(), passed.tolist(), strict=True) if not fine]


def _check(jobs: Jobs, uploads: dict[str, Upload], most: list[Tensor]) -> tuple[Tensor, list[Drop]]:
    passed = checks.good_jobs([*uploads.values()], most)
    dropped = []
    for job in (~passed).nonzero().flatten().tolist():
        for (name, (upload, weight)), limit in zip(uploads.items(), most, strict=True):
            one: Payload = {n: tree.take(p, job) for n, p in upload.items()}
            reason = checks.value_fault(one, weight[job], float(limit[job]))
            if reason is not None:
                dropped.append(Drop(int(jobs.clients[job]), name, reason))
                break
    return passed, dropped


def _select(upload: Upload, good: Tensor, bad: int) -> Upload:
    if not bad:
        return upload
    payload, weight = upload
    return {name: tree.take(part, good) for name, part in payload.items()}, weight[good]
