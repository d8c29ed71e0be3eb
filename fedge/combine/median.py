"""Coordinate-wise median: Yin et al., Byzantine-Robust Distributed Learning, ICML 2018."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedge.combine.stacked import coordinates
from fedge.core import Combine, Payload


@dataclass(frozen=True)
class Median(Combine):
    """The median of every coordinate over the uploads; weights do not count, since a liar would choose its own.

    Of an even number it is the mean of the two in the middle. Needs all uploads at once.
    """

    def together(self, uploads: Payload, weights: Tensor) -> Payload:
        return coordinates(_median, uploads)


def _median(leaf: Tensor) -> Tensor:
    ordered, count = leaf.sort(0).values, len(leaf)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
