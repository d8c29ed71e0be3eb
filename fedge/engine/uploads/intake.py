"""Uploads of a chunk of jobs, checked and taken in: merged at once, or kept until all are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedge import tree
from fedge.core import Ask, Drop, Params, Payload, Task
from fedge.engine.clients.directory import Jobs
from fedge.engine.clients.memory import Job
from fedge.engine.clients.run_task import Upload
from fedge.engine.uploads import checks
from fedge.engine.uploads.limits import Limits
from fedge.engine.uploads.sizes import Losses, Usuals, magnitude, read, sizes
from fedge.engine.uploads.stacking import Stack
from fedge.engine.uploads.streaming import Part, Sums

Total = Sums | Stack
Refused = tuple[list[Drop], list[Job]]  # who was dropped and why, and the jobs
MAX_RATIO = 1000.0
LEAST = 1e-2  # of what clients were sent: what is usual is no less
FIRST, SURE = 3, 16.0  # uploads before a median says anything; how far it may still move


def new_total(ask: Ask, tasks: Sequence[Task]) -> Total:
    """What takes in the uploads of an ask."""
    rows = None if tasks[0].rows is None else len(ask.rows or range(tasks[0].rows))
    losses = frozenset(name for task in tasks for name in task.losses)
    return Sums(ask.combine, rows, losses) if ask.combine.streams else Stack(ask.combine, rows, losses)


class Held(NamedTuple):
    """Jobs whose uploads wait until the whole cohort's are known."""

    jobs: Jobs
    positions: Tensor
    uploads: dict[str, Upload]
    sizes: list[list[float]]  # two per task, of its large and its small parts; by job


class Intake:
    """Takes in uploads chunk by chunk; one that is far larger than the cohort's median is held back, then dropped.

    More than `max_ratio` times what is usual (`fedge.engine.uploads.sizes`) is refused: one client can then not make
    the model overflow. What may turn out to be so, and the first few, are held until all are there; with `wait` all
    are, so that nothing depends on the order.

    Where most clients have nothing left to learn, what is usual is next to nothing, and who still learns is no liar: it
    is at least a hundredth of the largest number that clients have `before` them, which they were sent.
    """

    def __init__(
        self,
        ask: Ask,
        tasks: Sequence[Task],
        limits: Limits,
        max_ratio: float | None,
        wait: bool = False,
        before: Sequence[Params] = (),
    ) -> None:
        self.total, self.limits = new_total(ask, tasks), limits
        self.max_ratio, self.wait = None if ask.combine.bounds else max_ratio, wait
        self._usual, self._losses, self._by_client = Usuals(), Losses(), tasks[0].rows is not None
        self._held: list[Held] = []
        self._before = [*ask.send.values(), *before]
        self._least: float | None = None

    def compared_with(self, usual: Usuals) -> None:
        """Uploads of other asks, which share this, say what is usual as well; a client that is in many of them once.

        Close it when those of all of them are known.
        """
        self._usual, self._by_client = usual, True

    def take(self, jobs: Jobs, positions: Tensor, uploads: dict[str, Upload]) -> Refused:
        """Take in the uploads of these jobs; on a GPU, the host waits once for all that it has to know."""
        if not uploads:  # private tasks alone
            return [], []
        if self.max_ratio is None:
            return add_good(self.total, jobs, positions, uploads, self.limits)
        jobs_here, names = jobs.clients.shape[0], list(uploads)
        wait = self.wait or self._usual.count(names) + jobs_here < FIRST
        trial = None if wait else tried(self.total, jobs, positions, uploads, self.limits)
        even = {name: self._as_shares(name, upload, jobs) for name, (upload, _) in uploads.items()}
        rows = [row for name, upload in even.items() for row in sizes(upload, self._parts(name))]
        found, fits = read(rows, jobs_here, None if trial is None else trial.fits)
        self._usual.note(names, found, jobs.clients.tolist() if self._by_client else None)
        few = self.wait or self._usual.count(names) < FIRST
        doubt = [True] * jobs_here if few else self._usual.doubts(names, found, self.max_ratio / SURE)
        doubt = [one or more for one, more in zip(doubt, self._loud(jobs, uploads), strict=True)]
        whole = Held(jobs, positions, uploads, found)
        if not any(doubt):
            return self._add(whole, trial if fits else None)
        self._held.append(_chosen(whole, doubt))
        return self._add(_chosen(whole, [not one for one in doubt]))

    def close(self) -> Refused:
        """What was held back, now that all is known."""
        dropped, bad = list[Drop](), list[Job]()
        for held in self._held:
            names = list(held.uploads)
            reasons = [self._reason(names, job) for job in zip(*held.sizes, strict=True)]
            for (client, row), reason in zip(held.jobs.pairs(), reasons, strict=True):
                if reason is not None:
                    dropped.append(Drop(client, *reason))
                    bad.append((client, row))
            more = self._add(self._limited(_chosen(held, [reason is None for reason in reasons])))
            dropped, bad = dropped + more[0], bad + more[1]
        self._held = []
        return dropped, bad

    def _as_shares(self, task: str, upload: Payload, jobs: Jobs) -> Payload:
        """Parts that grow with a client's examples, as shares of the most that it can have."""
        found = dict(upload)
        for one in self.limits.tasks[task].ranges:
            if one.most is not None and one.part in upload:
                most = one.most(self.limits.examples(jobs.clients))
                shares = {
                    name: leaf / _beside(most, leaf)
                    for name, leaf in found[one.part].items()
                    if one.name in (None, name)
                }
                found[one.part] = found[one.part] | shares
        return found

    def _parts(self, task: str) -> tuple[str, ...]:
        return self.limits.tasks[task].losses

    def _loud(self, jobs: Jobs, uploads: dict[str, Upload]) -> list[bool]:
        """Which jobs hold a loss that may have to be limited."""
        assert self.max_ratio is not None
        found: list[list[bool]] = []
        for name, (upload, weight) in uploads.items():
            losses = self._parts(name)
            noted = [False] * len(weight)
            if losses:
                noted = self._losses.note(name, upload, losses, jobs.clients.tolist(), self.max_ratio).tolist()
            found.append(noted)
        return [any(job) for job in zip(*found, strict=True)]

    def _add(self, some: Held, trial: Trial | None = None) -> Refused:
        """Their sums, if these are known and good; else every upload is looked at."""
        if not some.jobs.clients.shape[0]:
            return [], []
        if trial is not None and isinstance(self.total, Sums):
            self.total.merge(trial.part)
            return [], []
        return add_good(self.total, some.jobs, some.positions, some.uploads, self.limits)

    def _limited(self, some: Held) -> Held:
        """The same uploads with losses that are within the limits; those that were not held are."""
        assert self.max_ratio is not None
        uploads = {
            name: (self._losses.limited(name, self._bounded(name, upload), self._parts(name), self.max_ratio), weight)
            for name, (upload, weight) in some.uploads.items()
        }
        return some._replace(uploads=uploads)

    def _bounded(self, task: str, upload: Payload) -> Payload:
        """An upload whose squares are within the limit of uploads; where all of them are zeros there is none."""
        assert self.max_ratio is not None
        squares, usual = self.limits.tasks[task].squares, self._usual.large(task)
        if not squares or not usual:
            return upload
        most = self.max_ratio * max(usual, self._floor())
        return upload | {n: tree.map_(lambda leaf: leaf.clamp(-most, most), upload[n]) for n in squares if n in upload}

    def _floor(self) -> float:
        """What is usual for large parts at least; looked for only if it matters."""
        if self._least is None:
            self._least = LEAST * magnitude(self._before)
        return self._least

    def _reason(self, tasks: list[str], job: tuple[float, ...]) -> tuple[str, str] | None:
        """Of which task an upload is too large, and how; None if it is not."""
        assert self.max_ratio is not None
        for place, task in enumerate(tasks):
            ratio = self.max_ratio ** (2 if self.limits.tasks[task].squares else 1)
            one = job[2 * place : 2 * place + 2]
            if self._usual.beyond([task], one, ratio) is None:
                continue
            if (found := self._usual.beyond([task], one, ratio, self._floor())) is not None:
                return task, f"its largest number is {found[1]:.3g}, over {ratio:g} times the usual {found[2]:.3g}"
        return None


def _beside(numbers: Tensor, leaf: Tensor) -> Tensor:
    """Numbers [J] in the dimensions of a leaf [J, ...]."""
    return numbers.to(leaf.device).view(-1, *[1] * (leaf.dim() - 1))


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


class Trial(NamedTuple):
    """The sums over all of some jobs, and whether every one of them is good: then they are to be merged."""

    part: Part
    fits: Tensor


def tried(total: Total, jobs: Jobs, positions: Tensor, uploads: dict[str, Upload], limits: Limits) -> Trial | None:
    """The sums as if all uploads were good, for rules that stream; nothing waits here."""
    if not isinstance(total, Sums):
        return None
    most = [limits.most(name, jobs).to(positions.device, non_blocking=True) for name in uploads]
    weights = [weight for _, weight in uploads.values()]
    counted = [limits.counted(name, weight, positions) for name, weight in zip(uploads, weights, strict=True)]
    part = total.part([payload for payload, _ in uploads.values()], counted, positions)
    return Trial(part, checks.weights_fit(weights, most) & part.finite())


def add_good(total: Total, jobs: Jobs, positions: Tensor, uploads: dict[str, Upload], limits: Limits) -> Refused:
    """Take in the uploads of these jobs, without those that fail a check; returns who failed, mostly nobody."""
    trial = tried(total, jobs, positions, uploads, limits)
    if trial is not None and isinstance(total, Sums) and bool(trial.fits):
        total.merge(trial.part)
        return [], []
    most = [limits.most(name, jobs).to(positions.device) for name in uploads]
    passed, dropped = _check(jobs, uploads, most)
    good = passed.nonzero().flatten()
    if len(good):
        counted = [(upload, limits.counted(name, w, positions)) for name, (upload, w) in uploads.items()]
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
