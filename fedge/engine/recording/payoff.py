"""Whether a recording pays: what it would save in the rest of the run, against what it costs.

A step of some shape took s seconds in all since the run began. If the rest of the run is `ahead` times as long as what
went before, it will take about s * ahead more, of which a recording saves a share:

    record  when  saves * ahead * s  >=  seconds of a recording

Clients of many sizes have steps of many shapes, and in a run of a dozen rounds most of them are rare. Recording changes
no number, so what a clock says here changes none either.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

# By what is recorded, as measured. A recording saves this share of a step's time, and takes as long as so many steps
# (until one was made; then what it took is known).
SAVES = {"single": 0.5, "stacked": 0.7}
COST = {"single": 40, "stacked": 12}

Ahead = Callable[[], float]  # how many times as long as what went before the rest of the run is


def endless() -> float:
    """Of a run of unknown length: everything that comes often is worth a recording."""
    return math.inf


class Payoff:
    """What the steps of some shapes took, and what their recordings took."""

    def __init__(self, ahead: Ahead = endless) -> None:
        self.ahead = ahead
        self._seconds: defaultdict[Any, float] = defaultdict(float)
        self._calls: Counter[Any] = Counter()
        self._recordings: list[float] = []

    def took(self, seconds: float, *kinds: Any) -> None:
        """A step of these kinds that was not recorded."""
        for kind in kinds:
            self._seconds[kind] += seconds
            self._calls[kind] += 1

    def calls(self, kind: Any) -> int:
        """Steps of a kind that were not recorded."""
        return self._calls[kind]

    def recorded(self, seconds: float) -> None:
        """A recording was made."""
        self._recordings.append(seconds)

    def pays(self, kind: Any, recordings: int = 1, stacked: bool = True) -> bool:
        """Whether so many recordings pay, which serve all steps of a kind."""
        ahead, way = self.ahead(), "stacked" if stacked else "single"
        return ahead == math.inf or SAVES[way] * ahead * self._seconds[kind] >= recordings * self._cost(kind, way)

    def _cost(self, kind: Any, way: str) -> float:
        """Seconds of a recording."""
        if self._recordings:
            return sum(self._recordings) / len(self._recordings)
        return COST[way] * self._seconds[kind] / max(1, self._calls[kind])
