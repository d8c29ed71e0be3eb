"""Whom the server waits for, and for how long.

A policy sees how long every client would take and says whose answers count and when the phase ends. Clients that are
not waited for work until then, and stop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fedge.checks import at_least_one, positive
from fedge.edge.draws import Array

Lots = Callable[[], Array]  # [C], drawn when they are needed


class Cut(NamedTuple):
    """Whose answers count, [C], when the phase ends, and why those who did not leave are dropped."""

    good: Array
    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class WaitForAll:
    """The phase ends when the last has answered or left:  T = max_k min(t_k, l_k)."""

    def cut(self, seconds: Array, left: Array, lots: Lots) -> Cut:
        """From the seconds that each client needs and those after which it leaves (infinity: never); of equals the one
        with the smallest lot comes first."""
        return Cut(seconds <= left, float(np.minimum(seconds, left).max(initial=0.0)))

    def budget(self, seconds: Array, compute: Array) -> Array | None:
        """The seconds that every client may compute, None: as long as it takes."""
        return None


@dataclass(frozen=True)
class Deadline(WaitForAll):
    """Who has not answered after so many seconds is dropped:  T = min(seconds, max_k min(t_k, l_k))."""

    seconds: float = field(metadata={"example": 60})

    def __post_init__(self) -> None:
        positive("seconds", self.seconds)

    def cut(self, seconds: Array, left: Array, lots: Lots) -> Cut:
        good, last, _ = super().cut(seconds, left, lots)
        return Cut(
            good & (seconds <= self.seconds), min(self.seconds, last), f"late: not done after {self.seconds:g} s"
        )


@dataclass(frozen=True)
class FirstOf(WaitForAll):
    """The first `count` answers count (over-selection):  T = the count-th smallest t_k of those who stay.

    Bonawitz et al., Towards Federated Learning at Scale, MLSys 2019, ask 1.3 times as many as they need.
    """

    count: int = field(metadata={"example": 10})

    def __post_init__(self) -> None:
        at_least_one("count", self.count)

    def cut(self, seconds: Array, left: Array, lots: Lots) -> Cut:
        answered, last, _ = super().cut(seconds, left, lots)
        if answered.sum() < self.count:
            return Cut(answered, last)
        order = np.lexsort((lots(), np.where(answered, seconds, np.inf)))[: self.count]
        good = np.zeros(len(seconds), bool)
        good[order] = True
        return Cut(good, float(seconds[order[-1]]), f"late: not among the first {self.count}")


@dataclass(frozen=True)
class PartialWork(WaitForAll):
    """Every client does the steps that fit, at least one, and is waited for (FedProx's partial work).

        steps_k = max {s : compute_k of s steps <= seconds - what is not computing},  at least 1, at most all

    Steps end within an epoch, so this is an exact fractional number of epochs; the last batch of an epoch takes as long
    as it is large. Of several tasks each gets the same share of its work. Weights stay the clients' numbers of
    examples, as FedProx has it (Li et al., MLSys 2020); FedNova divides every update by the steps that were done.
    Seconds in which nobody of the first cohort can do one step and send it are refused.
    """

    seconds: float = field(metadata={"example": 60})

    def __post_init__(self) -> None:
        positive("seconds", self.seconds)

    def budget(self, seconds: Array, compute: Array) -> Array | None:
        left: Array = self.seconds - (seconds - compute)
        return left if (left < compute).any() else None


Policy = WaitForAll | Deadline | FirstOf | PartialWork
