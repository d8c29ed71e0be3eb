"""How much one client may weigh in a mean."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedge.checks import positive
from fedge.core import Task
from fedge.engine.clients.directory import Jobs
from fedge.once import is_new

log = logging.getLogger("fedge")
MAX_WEIGHT, MAX_SHARE = 1e6, 0.5
FEW = 4  # so few clients may have any share: honest ones often differ as much


def check_limits(max_weight: float, max_share: float | None) -> None:
    positive("max_weight", max_weight)
    positive("max_share", max_share, optional=True)
    if max_share is not None and max_share > 1:
        raise ValueError(f"max_share is {max_share}, it must be at most 1: it is a share of a mean")


class Limits:
    """The weights that the jobs of one ask may have, by task.

    A client with n_k examples may weigh b_k = min(max_weight, heaviest(n_k)), by default its n_k examples; an upload
    that claims more is refused. Of all clients that answer for a row, J, one counts for a share s at most:

        its weight is min(w_k, c),   c = s * sum_j min(b_j, c),   s = max(max_share, 4 / J)

    so up to four clients may have any share, of five one may have four fifths. Weights below c stay as they are.
    """

    def __init__(
        self,
        tasks: Mapping[str, Task],
        sizes: Callable[[Tensor], Tensor],
        max_weight: float = MAX_WEIGHT,
        max_share: float | None = MAX_SHARE,
    ) -> None:
        self.tasks, self.sizes, self.max_weight, self.max_share = tasks, sizes, max_weight, max_share
        self._caps: dict[str, Tensor] = {}  # by task that has any: one per position, infinite where nobody is too heavy

    def examples(self, clients: Tensor) -> Tensor:
        """How many examples clients have, float64 [J]; whoever says that it has more is believed to have max_weight."""
        return self.sizes(clients).double().clamp(max=self.max_weight)

    def most(self, task: str, jobs: Jobs) -> Tensor:
        """b_k of every job, float64 [J], on the CPU."""
        sizes, heaviest = self.sizes(jobs.clients), self.tasks[task].heaviest
        bound = sizes if heaviest is None else torch.as_tensor(heaviest(sizes)).expand(sizes.shape)
        return torch.clamp(bound.double(), max=self.max_weight)

    def among(self, jobs: Jobs) -> None:
        """These jobs answer: from now on each counts for its share of them at most."""
        for name, task in self.tasks.items():
            self._caps.pop(name, None)
            if not task.private and self.max_share is not None and len(jobs.clients):
                caps = self._cap(self.most(name, jobs), jobs.positions)
                if any(map(math.isfinite, caps)):
                    self._caps[name] = torch.tensor(caps, dtype=torch.float64)

    def _cap(self, bounds: Tensor, positions: Tensor) -> list[float]:
        assert self.max_share is not None
        last = int(positions.numpy().max())
        rows = [bounds[positions == row] for row in range(last + 1)] if last else [bounds]
        caps = [cap(row, self.max_share) for row in rows]
        for row, limit in zip(rows, caps, strict=True):
            if math.isfinite(limit):
                _tell(float(row.max() / row.sum()), limit / float(row.clamp(max=limit).sum()))
        return caps

    def counted(self, task: str, weight: Tensor, positions: Tensor) -> Tensor:
        """What weights [J] count for, by the position of each job."""
        caps = self._caps.get(task)
        return weight if caps is None else torch.minimum(weight, caps.to(weight)[positions])


def cap(bounds: Tensor, max_share: float) -> float:
    """The c of one row, infinite if nobody has too large a share."""
    if not len(bounds):
        return math.inf
    share, rest = max(max_share, FEW / len(bounds)), float(bounds.sum())
    if float(bounds.numpy().max()) <= share * rest:
        return math.inf
    ordered = bounds.sort(descending=True).values.tolist()
    for capped, heaviest in enumerate(ordered):
        found = share * rest / (1 - capped * share) if capped * share < 1 else math.inf
        if heaviest <= found:  # so are all after it
            return found
        rest -= heaviest
    return math.inf


def _tell(share: float, counts: float) -> None:
    """Once: it is no fault of the client's, but its data count for less than they are."""
    if is_new("max_share"):
        log.warning(
            "one client has %.0f %% of its cohort's weight: it counts for %.0f %%; max_share of the link says so",
            100 * share,
            100 * counts,
        )
