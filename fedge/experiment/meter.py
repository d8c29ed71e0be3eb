"""How far a run is, how fast it goes, and when it will be done."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fedge.runs.run import Record, has_diverged

RECENT = 10  # rounds of which the pace is the mean; the very first are slow


@dataclass(frozen=True)
class Progress:
    """One look at a run."""

    round: int
    rounds: int
    accuracy: float | None = None  # of the last evaluation
    megabytes: float = 0.0  # both ways
    pace: float | None = None  # seconds per round, evaluation included
    diverged: bool = False  # the last test loss is not finite, or absurd
    loss: float | None = None  # of the last evaluation

    @property
    def left(self) -> float | None:
        """Seconds to the end."""
        return None if self.pace is None else self.pace * (self.rounds - self.round)


class Meter:
    """Adds records up; those of an earlier session count for the MB, not for the pace."""

    def __init__(
        self,
        rounds: int,
        before: Iterable[Record] = (),
        clock: Callable[[], float] = time.perf_counter,
        limit: float = math.inf,
    ) -> None:
        self._limit = limit  # a test loss beyond it is that of a run that has diverged
        self._clock, self._times = clock, deque([clock()], RECENT + 1)
        self.progress = Progress(0, rounds)
        self._before = list(before)

    def __call__(self, record: Record) -> Progress:
        for one in self._before:
            if one["round"] < record["round"]:
                self._add(one)
        self._before = []
        self._times.append(self._clock())
        return self._add(record)

    def _add(self, record: Record) -> Progress:
        old = self.progress
        accuracy = record.get("test_accuracy")
        self.progress = Progress(
            record["round"],
            old.rounds,
            old.accuracy if accuracy is None else accuracy,
            old.megabytes + (record["up_bytes"] + record["down_bytes"]) / 1e6,
            self._pace(),
            has_diverged(record, self._limit) if "test_loss" in record else old.diverged,
            record.get("test_loss", old.loss),
        )
        return self.progress

    def total(self, history: Iterable[Record]) -> Progress:
        """The whole run, when it has ended; nothing was trained now if there is no pace."""
        self.progress = Progress(0, self.progress.rounds)
        for record in history:
            self._add(record)
        return self.progress

    def _pace(self) -> float | None:
        steps = len(self._times) - 1
        return (self._times[-1] - self._times[0]) / steps if steps else None
