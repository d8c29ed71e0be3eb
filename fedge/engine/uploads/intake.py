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
    sizes: list[list[float]]  # two per task, of its large and its small parts; by job


class Intake:
    """Takes in uploads chunk by chunk; one that is far larger than the cohort's median is held back, then dropped.

    The size of an upload is its largest magnitude: of its parts with at least 64 numbers, and apart from them of the
    others beside them (counters). More than `max_ratio` times the lower median of all uploads of the ask is
    refused, where for the others a median below 1 counts as 1: one client can then not make the model overflow. What
    may turn out to be so, and the first few, are held until all are there, so the outcome does not depend on the order.
    """

    def __init__(self, ask: Ask, task: Task, limits: Limits, max_ratio: float | None) -> None:
        self.total, self.limits, self.max_ratio = new_total(ask, task), limits, max_ratio
        self._sizes: list[list[float]] = []  # two per task, ascending
        self._held: list[Held] = []
        if ask.combine.bounds:
            self.max_ratio = None

    def take(self, jobs: Jobs, positions: Tensor, uploads: dict[str, Upload]) -> Refused:
        if not uploads:  # private tasks alone
            return [], []
        if self.max_ratio is None or not any(_parted(upload)[0] for upload, _ in uploads.values()):
            return add_good(self.total, jobs, positions, uploads, self.limits)
        sizes = [size for upload, _ in uploads.values() for size in _sizes(upload)]
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
            math.isfinite(size) and size * SURE > self.max_ratio * _usual(place, known)
            for place, (size, known) in enumerate(zip(job, self._sizes, strict=True))
        )

    def _reason(self, job: tuple[float, ...]) -> tuple[int, str] | None:
        """Of which task an upload is too large, and how; None if it is not."""
        assert self.max_ratio is not None
        for place, (size, known) in enumerate(zip(job, self._sizes, strict=True)):
            usual = _usual(place, known)
            if math.isfinite(size) and usual and size > self.max_ratio * usual:
                return (
                    place // 2,
                    f"its largest number is {size:.3g}, over {self.max_ratio:g} times the usual {usual:.3g}",
                )
        return None


def _sizes(upload: Payload) -> tuple[list[float], list[float]]:
    """The largest magnitude in every job's upload: of its large parts, and of its small ones."""
    large, small = _parted(upload)
    beside = small if large else []  # losses alone may differ by any factor
    found = torch.stack([_largest(large, upload), _largest(beside, upload)]).tolist()
    return found[0], found[1]


def _parted(upload: Payload) -> tuple[list[Tensor], list[Tensor]]:
    """The leaves of parts with at least 64 numbers, and those of the others."""
    large, small = list[Tensor](), list[Tensor]()
    for part in upload.values():
        (large if is_coded(tree.take(part, 0)) else small).extend(part.values())
    return large, small


def _largest(leaves: list[Tensor], upload: Payload) -> Tensor:
    """[J] in double precision; zeros without leaves."""
    if leaves:
        return torch.stack([checks.largest(leaf).double() for leaf in leaves]).amax(0)
    like = next(iter(next(iter(upload.values())).values()))
    return torch.zeros(len(like), dtype=torch.double, device=like.device)


def _usual(place: int, ordered: list[float]) -> float:
    """The lower median, so that one of two cannot raise it; small parts, at odd places, may all be near 0."""
    median = ordered[(len(ordered) - 1) // 2] if ordered else 0.0
    return max(median, 1.0) if place % 2 else median


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
