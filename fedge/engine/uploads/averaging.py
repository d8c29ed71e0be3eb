"""The uploads of a chunk of jobs, checked and taken into the mean."""

from __future__ import annotations

from torch import Tensor

from fedge import tree
from fedge.core import Drop
from fedge.engine.clients.population import Jobs
from fedge.engine.clients.run_task import Upload
from fedge.engine.uploads import replies


def add_good(
    mean: replies.Mean, jobs: Jobs, positions: Tensor, uploads: dict[str, Upload], max_weight: float
) -> list[Drop]:
    """Into the mean with the uploads of these jobs, without those that fail a check; all is well, mostly."""
    payloads, weights = [payload for payload, _ in uploads.values()], [weight for _, weight in uploads.values()]
    part = mean.part(payloads, weights, positions)
    if bool(replies.weights_fit(weights, max_weight) & part.finite()):
        mean.merge(part)
        return []
    good, dropped = _check(jobs, uploads, max_weight)
    if len(good):
        chosen = [_select(upload, good, len(dropped)) for upload in uploads.values()]
        mean.add([u for u, _ in chosen], [w for _, w in chosen], positions[good])
    return dropped


def _check(jobs: Jobs, uploads: dict[str, Upload], max_weight: float) -> tuple[Tensor, list[Drop]]:
    passed = replies.good_jobs([*uploads.values()], max_weight)
    dropped = []
    for job in (~passed).nonzero().flatten().tolist():
        for name, (upload, weight) in uploads.items():
            one = {n: tree.take(p, job) for n, p in upload.items()}
            reason = replies.value_fault(one, weight[job], max_weight)
            if reason is not None:
                dropped.append(Drop(int(jobs.clients[job]), name, reason))
                break
    return passed.nonzero().flatten(), dropped


def _select(upload: Upload, good: Tensor, bad: int) -> Upload:
    if not bad:
        return upload
    payload, weight = upload
    return {name: tree.take(part, good) for name, part in payload.items()}, weight[good]
