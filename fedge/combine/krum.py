"""Krum: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NIPS 2017."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from fedge.checks import at_least_one
from fedge.combine.stacked import coordinates, flat
from fedge.core import Combine, Payload
from fedge.once import is_new

log = logging.getLogger("fedge")


@dataclass(frozen=True)
class Krum(Combine):
    """The plain mean of the `keep` uploads that lie closest to their neighbours, with `bad` liars expected.

        score_i = sum of the J - bad - 2 smallest |u_i - u_j|^2, j != i

    `keep = 1` is Krum, more of them are multi-Krum; no more than J - bad are kept, and at least one. Distances are over
    all tensors of an upload, in float64. The paper's guarantee needs J >= 2 bad + 3: with fewer uploads, as in a small
    group of FedOVA, at least one neighbour is looked at, and a warning says so once. Needs all uploads at once.
    """

    bad: int = 0
    keep: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.bad, bool) or not isinstance(self.bad, int) or self.bad < 0:
            raise ValueError(f"bad is {self.bad!r}, it must be a whole number of at least 0: the liars in a cohort")
        at_least_one("keep", self.keep)

    def together(self, uploads: Payload, weights: Tensor) -> Payload:
        scores = self.scores(uploads)
        self._warn(len(scores))
        chosen = scores.argsort(stable=True)[: max(1, min(self.keep, len(scores) - self.bad))].sort().values
        return coordinates(lambda leaf: leaf[chosen].mean(0), uploads)

    def _warn(self, count: int) -> None:
        if count < 2 * self.bad + 3 and is_new(self):
            log.warning(
                "%s got %d uploads; it resists %d liars among %d or more", self, count, self.bad, 2 * self.bad + 3
            )

    def scores(self, uploads: Payload) -> Tensor:
        """[J], the smaller the more like the others."""
        distances = _distances(uploads)
        count = len(distances)
        near = min(max(1, count - self.bad - 2), max(1, count - 1))
        others = distances + torch.diag(torch.full_like(distances[0], torch.inf)) if count > 1 else distances
        return others.sort(1).values[:, :near].sum(1)


def _distances(uploads: Payload) -> Tensor:
    """|u_i - u_j|^2, [J, J]."""
    leaves = [flat(leaf).double() for part in uploads.values() for leaf in part.values()]
    count = len(leaves[0])
    total = leaves[0].new_zeros(count, count)
    for leaf in leaves:
        for i in range(count):
            total[i] += (leaf - leaf[i]).square().sum(1)
    return total
