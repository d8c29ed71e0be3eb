"""Coordinate-wise trimmed mean: Yin et al., Byzantine-Robust Distributed Learning, ICML 2018."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from fedge.combine.stacked import coordinates
from fedge.core import Combine, Payload


@dataclass(frozen=True)
class TrimmedMean(Combine):
    """Of every coordinate the mean without the floor(share J) smallest and as many largest of the J uploads.

    Weights do not count. Needs all uploads at once.
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 <= self.share < 0.5:
            raise ValueError(f"share is {self.share!r}, it must be at least 0 and below 0.5: it is cut at both ends")

    def together(self, uploads: Payload, weights: Tensor) -> Payload:
        return coordinates(self._mean, uploads)

    def _mean(self, leaf: Tensor) -> Tensor:
        cut = math.floor(self.share * len(leaf) + 1e-9)  # 0.29 * 100 is a little below 29
        return leaf.sort(0).values[cut : len(leaf) - cut].mean(0)
