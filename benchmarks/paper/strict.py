"""When a run counts as diverged, strictly: fixed before the runs that it judges (`JUDGED`)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from fedge.sweep.store import Line

JUDGED = ("splits", "balanced-sharing")  # experiments that began after the rule was fixed
SETTLED, DEEP, LAST, LOSS = 50, 0.9, 20, 0.03


def fell(line: Line) -> bool:
    """Whether a run failed, dipped or faded.

    It dipped if a round after the 50th is below nine tenths of the best before it; it faded if the mean of its last 20
    rounds is more than three points below the best mean of 20 rounds in a row.
    """
    seen = [value for value in line.get("test_accuracy", []) if value is not None]
    return bool(line["failed"]) or _dipped(seen) or _faded(seen)


def _dipped(seen: Sequence[float]) -> bool:
    return any(seen[at] < DEEP * max(seen[:at]) for at in range(SETTLED, len(seen)))


def _faded(seen: Sequence[float]) -> bool:
    means = [mean(seen[at : at + LAST]) for at in range(len(seen) - LAST + 1)]
    return bool(means) and means[-1] < max(means) - LOSS
