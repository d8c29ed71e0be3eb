"""Uploads of asynchronous clients are checked as those of a cohort are: weight, finite numbers, and size.

There is no cohort to compare with. What is usual is the median over all clients so far, of each one's last upload, so
that who answers more often has no more say (`fedge.engine.uploads.sizes` says what a size is).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedge import tree
from fedge.core import Payload
from fedge.edge.draws import Array
from fedge.edge.underway import NOT_FINITE, Sizes
from fedge.engine.clients.directory import Jobs
from fedge.engine.simulator import Simulator
from fedge.engine.uploads import checks
from fedge.engine.uploads.intake import LEAST
from fedge.engine.uploads.limits import Limits
from fedge.engine.uploads.sizes import Usual, magnitude, sizes


class Judge:
    """Says what is wrong with the uploads of a stack."""

    def __init__(self, simulator: Simulator, names: tuple[str, ...]) -> None:
        tasks = {name: simulator.tasks[name] for name in names}
        self.task, self.max_ratio = names[-1], simulator.max_ratio  # a stack has the weights of its last task
        self.limits = Limits(tasks, simulator.directory.sizes, simulator.max_weight)
        self.losses = tuple(name for task in tasks.values() for name in task.losses)

    def __call__(
        self, known: Sizes, jobs: Jobs, upload: Payload, weights: Tensor, sent: Payload
    ) -> tuple[Sizes, dict[int, str]]:
        """The sizes with those of these jobs [J], and by place why an upload is bad, mostly nothing."""
        large, small = (torch.zeros_like(weights) if one is None else one for one in sizes(upload, self.losses))
        finite = checks.finite_jobs({name: upload[name] for name in self.losses if name in upload}, weights == weights)
        rows = [one.double() for one in (large, small, weights, finite)]
        *columns, weight, told = torch.stack(rows).cpu().numpy()
        most, table = self.limits.most(self.task, jobs).numpy(), np.stack(columns, 1)
        good = np.isfinite(table).all(1) & (told > 0) & (weight >= checks.LIGHTEST) & (weight <= most * checks.ROUNDING)
        bad = dict[int, str]()
        for job in np.flatnonzero(~good).tolist():
            one = {name: tree.take(part, job) for name, part in upload.items()}
            bad[job] = checks.value_fault(one, weights[job], float(most[job])) or NOT_FINITE
        if self.max_ratio is None:
            return known, bad
        known = noted(known, jobs.clients.numpy(), table)
        for job in np.flatnonzero(_doubts(known, table, self.max_ratio) & good).tolist():
            least = LEAST * magnitude([tree.take(part, job) for part in sent.values()])
            if (found := _beyond(known, tuple(table[job].tolist()), self.max_ratio, least)) is not None:
                size, usual = found
                bad[job] = f"its largest number is {size:.3g}, over {self.max_ratio:g} times the usual {usual:.3g}"
        return known, bad


def noted(known: Sizes, clients: Array, table: Array) -> Sizes:
    """The sizes so far, with those of more uploads in place of their clients' last ones."""
    fine = np.isfinite(table).all(1)
    who, last = _by_client(clients[fine], table[fine])
    if not known:
        return {"clients": torch.from_numpy(who), "sizes": torch.from_numpy(last)}
    ids, before = known["clients"].numpy(), known["sizes"].numpy().copy()
    place = np.searchsorted(ids, who)
    there = ids[np.minimum(place, len(ids) - 1)] == who if len(ids) else np.zeros(len(who), bool)
    before[place[there]] = last[there]
    if not there.all():
        ids = np.insert(ids, place[~there], who[~there])
        before = np.insert(before, place[~there], last[~there], axis=0)
    return {"clients": torch.from_numpy(ids), "sizes": torch.from_numpy(before)}


def _by_client(clients: Array, table: Array) -> tuple[Array, Array]:
    """Every client once, ascending; of one with several uploads the lower median of each size."""
    who, count = np.unique(clients, return_counts=True)
    middle = count.cumsum() - count + (count - 1) // 2
    return who, np.stack([column[np.lexsort((column, clients))][middle] for column in table.T], 1)


def _doubts(known: Sizes, table: Array, ratio: float) -> Array:
    """Which uploads may be too large: what is usual is no less than the lower median, nor than 1 of small parts."""
    found = np.zeros(len(table), bool)
    for place, (column, new) in enumerate(zip(known["sizes"].numpy().T, table.T, strict=True)):
        if place == 0 or (new > ratio).any():
            middle = (len(column) - 1) // 2
            median = np.partition(column, middle)[middle] if len(column) else np.inf
            found |= new > ratio * max(median, float(place))
    return found


def _beyond(known: Sizes, job: tuple[float, ...], ratio: float, least: float) -> tuple[float, float] | None:
    usual = Usual()
    usual.note([np.sort(column).tolist() for column in known["sizes"].numpy().T])
    return usual.beyond(job, ratio, least)
