"""Uploads of a chunk of jobs, checked and taken in: merged at once, or kept until all are there."""

from __future__ import annotations

from torch import Tensor

from fedge import tree
from fedge.core import Ask, Drop, Payload, Task
from fedge.engine.clients.directory import Jobs
from fedge.engine.clients.memory import Job
from fedge.engine.clients.run_task import Upload
from fedge.engine.uploads import checks
from fedge.engine.uploads.stacking import Stack
from fedge.engine.uploads.streaming import Sums

Total = Sums | Stack


def new_total(ask: Ask, task: Task) -> Total:
    """What takes in the uploads of an ask."""
    rows = None if task.rows is None else len(ask.rows or range(task.rows))
    return Sums(ask.combine, rows) if ask.combine.streams else Stack(ask.combine, rows)


def add(total: Total, uploads: list[Upload], positions: Tensor, clients: Tensor) -> None:
    """Good uploads, one per task, all with a leading job axis."""
    payloads, weights = [payload for payload, _ in uploads], [weight for _, weight in uploads]
    if isinstance(total, Sums):
        total.merge(total.part(payloads, weights, positions))
    else:
        total.add(payloads, weights, positions, clients)


def add_good(
    total: Total, jobs: Jobs, positions: Tensor, uploads: dict[str, Upload], max_weight: float
) -> tuple[list[Drop], list[Job]]:
    """Take in the uploads of these jobs, without those that fail a check; returns those that failed, usually none."""
    if isinstance(total, Sums):
        payloads, weights = [payload for payload, _ in uploads.values()], [weight for _, weight in uploads.values()]
        part = total.part(payloads, weights, positions)
        if bool(checks.weights_fit(weights, max_weight) & part.finite()):
            total.merge(part)
            return [], []
    passed, dropped = _check(jobs, uploads, max_weight)
    good = passed.nonzero().flatten()
    if len(good):
        chosen = [_select(upload, good, len(dropped)) for upload in uploads.values()]
        add(total, chosen, positions[good], jobs.clients[good.cpu()])
    return dropped, [job for job, fine in zip(jobs.pairs(), passed.tolist(), strict=True) if not fine]


def _check(jobs: Jobs, uploads: dict[str, Upload], max_weight: float) -> tuple[Tensor, list[Drop]]:
    passed = checks.good_jobs([*uploads.values()], max_weight)
    dropped = []
    for job in (~passed).nonzero().flatten().tolist():
        for name, (upload, weight) in uploads.items():
            one: Payload = {n: tree.take(p, job) for n, p in upload.items()}
            reason = checks.value_fault(one, weight[job], max_weight)
            if reason is not None:
                dropped.append(Drop(int(jobs.clients[job]), name, reason))
                break
    return passed, dropped


def _select(upload: Upload, good: Tensor, bad: int) -> Upload:
    if not bad:
        return upload
    payload, weight = upload
    return {name: tree.take(part, good) for name, part in payload.items()}, weight[good]
