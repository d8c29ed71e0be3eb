"""Series of a run: what was measured, against rounds, megabytes (1e6 bytes), seconds, virtual seconds or joules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeGuard

from fedge.checks import LARGEST
from fedge.report.errors import ReportError
from fedge.report.read import RunFolder

Against = Literal["rounds", "MB", "seconds", "virtual_seconds", "joules"]
MB = 1e6
KNOWN = ("test_accuracy", "test_loss")
REGRESSION = {"r2": 1, "mae": 2, "mse": 3}  # computed of every regression; their places in a narrow table


class Curve(NamedTuple):
    """Points of one line, in the order of rounds."""

    x: list[float]
    y: list[float]


class Reached(NamedTuple):
    """What it took to reach a target."""

    round: int
    megabytes: float
    seconds: float
    virtual_seconds: float | None = None  # where there was a clock
    joules: float | None = None


def curve(run: RunFolder, key: str, against: Against = "rounds") -> Curve:
    """The values of `key`, such as test_accuracy, in the rounds that have one; none against what was not recorded."""
    if not recorded(run, against):
        return Curve([], [])
    points = [
        (x, float(record[key]))
        for x, record in zip(elapsed(run, against), run.rounds, strict=True)
        if is_number(record.get(key))
    ]
    return Curve([x for x, _ in points], [y for _, y in points])


def recorded(run: RunFolder, against: Against) -> bool:
    """Whether a run knows this cost of its rounds: only one with a clock has virtual seconds and joules.

    Devices without watts take 0 J, which is not known to be what they take.
    """
    if against == "joules":
        return any(record.get("joules") for record in run.rounds)
    return against != "virtual_seconds" or last(run, against) is not None


def clocked(runs: Iterable[RunFolder]) -> bool:
    """Whether any run had devices, and a clock with them."""
    return any(recorded(run, "virtual_seconds") for run in runs)


def elapsed(run: RunFolder, against: Against) -> list[float]:
    """For every round: its number, or the MB (setup included), seconds or joules spent to its end."""
    if against == "rounds":
        return [float(_round(run, at)) for at in range(len(run.rounds))]
    if against != "MB":
        return list(accumulate(_numbers(run.rounds, against)))
    ways = zip(_numbers(run.rounds, "up_bytes"), _numbers(run.rounds, "down_bytes"), strict=True)
    setup = setup_bytes(run, "up") + setup_bytes(run, "down")
    return [total / MB for total in accumulate((up + down for up, down in ways), initial=setup)][1:]


def megabytes(run: RunFolder, way: Literal["up", "down"]) -> float:
    """All MB of one direction, setup included."""
    return (setup_bytes(run, way) + sum(_numbers(run.rounds, f"{way}_bytes"))) / MB


def setup_bytes(run: RunFolder, way: Literal["up", "down"]) -> float:
    """Bytes before the first round: the ledger's round 0."""
    return sum(_numbers((row for row in run.ledger if row.get("round") == 0), way))


def last(run: RunFolder, key: str) -> Any:
    """The newest value of a key, or None."""
    found = [record[key] for record in run.rounds if record.get(key) is not None]
    return found[-1] if found else None


def own_metrics(runs: Iterable[RunFolder]) -> list[str]:
    """Metrics of the user's own that any round was judged by, `f1` for test_f1, in the order in which they came."""
    records = (record for run in runs for record in run.rounds)
    keys = dict.fromkeys(key for record in records for key, value in record.items() if is_number(value))
    return [key.removeprefix("test_") for key in keys if key.startswith("test_") and key not in KNOWN]


def telling_metrics(runs: Sequence[RunFolder]) -> list[str]:
    """Own metrics for a table with little room, the most telling first: those asked for, then those of any regression.

    A squared error that is the loss in every round is left out: the loss is in the table already.
    """
    twice = all(map(_is_loss, (record for run in runs for record in run.rounds)))
    found = [name for name in own_metrics(runs) if not (name == "mse" and twice)]
    return sorted(found, key=lambda name: REGRESSION.get(name, 0 if is_asked_for(name) else 9))


def is_asked_for(metric: str) -> bool:
    """Whether a metric is not one of those that are computed unasked, of a regression or client by client."""
    return metric not in REGRESSION and not metric.startswith("client_")


def _is_loss(record: dict[str, Any]) -> bool:
    """Whether a round's squared error, if it has one, is its loss."""
    error, loss = record.get("test_mse"), record.get("test_loss")
    return not is_number(error) or (is_number(loss) and math.isclose(error, loss, rel_tol=1e-4))


def final_metric(run: RunFolder, name: str) -> float | None:
    """The mean over the rounds that `final` means in the run's summary; without one, the last value."""
    rounds = run.summary.get("final_rounds")
    late = run.rounds[-int(rounds) :] if is_number(rounds) else run.rounds
    found = [float(record[f"test_{name}"]) for record in late if is_number(record.get(f"test_{name}"))]
    if not found:
        return None
    return sum(found) / len(found) if is_number(rounds) else found[-1]


def best_accuracy(run: RunFolder) -> float | None:
    return max(curve(run, "test_accuracy").y, default=None)


def has_no_accuracy(runs: Iterable[RunFolder]) -> bool:
    """Whether runs were evaluated and none of them has an accuracy, as in a regression: no target counts anything."""
    records = [record for run in runs for record in run.rounds if "test_loss" in record]
    return bool(records) and not any(is_number(record.get("test_accuracy")) for record in records)


def to_target(run: RunFolder, target: float) -> Reached | None:
    """The first evaluated round whose test accuracy is at least the target."""
    for at, record in enumerate(run.rounds):
        accuracy = record.get("test_accuracy")
        if is_number(accuracy) and accuracy >= target:
            ways: tuple[Against, ...] = ("MB", "seconds", "virtual_seconds", "joules")
            mb, seconds, virtual, joules = (elapsed(run, way)[at] if recorded(run, way) else None for way in ways)
            return Reached(_round(run, at), mb or 0.0, seconds or 0.0, virtual, joules)
    return None


def default_target(runs: Sequence[RunFolder]) -> float | None:
    """90 % of the best accuracy any run reached that did not fail, rounded down to a whole percent."""
    sound = [run for run in runs if not run.failed] or runs
    best = max((found for run in sound if (found := best_accuracy(run)) is not None), default=None)
    # 0.7 * 90 is 62.99...: the whole percent must not be lost to rounding
    return None if best is None else math.floor(best * 90 + 1e-9) / 100


def check_target(target: float) -> None:
    if not is_number(target) or not 0 < target <= 1:
        raise ReportError(f"target is {target}, it must be above 0 and at most 1: write 0.85 for an accuracy of 85 %")


def running_mean(values: Sequence[float], width: int = 5) -> list[float]:
    """Centred mean; the window shrinks at both ends, so that no point is lost."""
    reach = width // 2
    near = (values[max(0, at - reach) : at + reach + 1] for at in range(len(values)))
    return [sum(window) / len(window) for window in near]


def is_number(value: Any) -> TypeGuard[float]:
    """A finite number: a diverged loss (NaN, infinity) has no place on an axis.

    Nor have numbers beyond single precision, which a sum or a square of takes out of the range of floats.
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _round(run: RunFolder, at: int) -> int:
    found = run.rounds[at].get("round")
    return int(found) if is_number(found) else at + 1


def _numbers(records: Iterable[dict[str, Any]], key: str) -> list[float]:
    return [record[key] if is_number(record.get(key)) else 0 for record in records]
