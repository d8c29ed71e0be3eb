"""What a user adds to a run: how often it is looked at, further metrics, and when it is enough.

A metric is a function of scores [N, ...] and labels [N, ...]; an end is a function of the records so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from fedge.checks import at_least_one, choice, finite, nearest, non_negative, positive
from fedge.metrics import Metric, named

Record = dict[str, Any]
Until = Callable[[Sequence[Record]], "str | bool"]  # records -> why it is enough; empty or False: go on
SMALL = ("loss", "mse", "mae", "rmse", "error", "perplexity")  # ends of metrics that should be small
TAKEN = ("loss", "accuracy", "class_accuracy")


def _check_metric(metric: str, history: Sequence[Record]) -> None:
    """Refuse a name that no record will have; a round that was not evaluated proves nothing."""
    last = history[-1] if history else {}
    if "test_loss" in last and metric not in last:
        known = [name for name in last if name.startswith(("test_", "train_")) and not name.endswith("class_accuracy")]
        raise ValueError(f"metric is {metric!r}{nearest(f'test_{metric}', known)}, the record has {', '.join(known)}")
    if (found := last.get(metric)) is not None and (isinstance(found, bool) or not isinstance(found, int | float)):
        kind = type(found).__name__
        raise ValueError(f"metric is {metric!r}, which is a {kind} in the record: name a number, such as 'test_loss'")


@dataclass(frozen=True)
class Reached:
    """Enough when a metric is at least so good, such as Reached(0.9)."""

    value: float
    metric: str = "test_accuracy"
    best: Literal["largest", "smallest"] = "largest"

    def __post_init__(self) -> None:
        choice("best", self.best, ("largest", "smallest"))
        finite("value", self.value)
        if str(self.metric).endswith("accuracy") and not 0 < self.value <= 1:
            raise ValueError(
                f"value is {self.value:g}, it must be above 0 and at most 1: write 0.85 for an accuracy of 85 %"
            )

    def __call__(self, history: Sequence[Record]) -> str:
        _check_metric(self.metric, history)
        last = history[-1].get(self.metric) if history else None
        if last is None or (last < self.value if self.best == "largest" else last > self.value):
            return ""
        return f"{self.metric} is {last:.4g} after round {history[-1]['round']}, {self.value:g} was wanted"


@dataclass(frozen=True)
class Plateau:
    """Enough when a metric has not improved by more than `least` in the last `patience` evaluated rounds."""

    patience: int = 10
    metric: str = "test_accuracy"
    best: Literal["largest", "smallest"] = "largest"
    least: float = 0.0

    def __post_init__(self) -> None:
        at_least_one("patience", self.patience)
        non_negative("least", self.least)
        choice("best", self.best, ("largest", "smallest"))

    def __call__(self, history: Sequence[Record]) -> str:
        _check_metric(self.metric, history)
        seen = [(one["round"], one[self.metric]) for one in history if one.get(self.metric) is not None]
        sign = 1 if self.best == "largest" else -1
        top, at = -float("inf"), 0
        for position, (_, value) in enumerate(seen):
            if sign * value > top + self.least or position == 0:
                top, at = sign * value, position
        if len(seen) - 1 - at < self.patience:
            return ""
        return f"{self.metric} has not improved since round {seen[at][0]}"


@dataclass(frozen=True)
class Spent:
    """Enough when so many megabytes (1e6 bytes, both ways, without the setup) were sent."""

    megabytes: float

    def __post_init__(self) -> None:
        positive("megabytes", self.megabytes)

    def __call__(self, history: Sequence[Record]) -> str:
        spent = sum(one["up_bytes"] + one["down_bytes"] for one in history) / 1e6
        return f"{spent:.4g} MB were sent, {self.megabytes:g} were allowed" if spent >= self.megabytes else ""


@dataclass(frozen=True)
class Best:
    """Keep the model of the best round too: by test accuracy, or without one by test loss, or by the metric named."""

    metric: str | None = None
    best: Literal["largest", "smallest"] | None = None  # None: largest, of a loss or an error smallest

    def __post_init__(self) -> None:
        if self.best is not None:
            choice("best", self.best, ("largest", "smallest"))

    def value(self, record: Record) -> float | None:
        """How good a round is, the larger the better; None if it was not evaluated."""
        if "test_loss" not in record:
            return None
        metric, best = self.by(record)
        _check_metric(metric, [record])
        found = record[metric]
        return None if found is None or found != found else -found if best == "smallest" else found

    def values(self, history: Sequence[Record]) -> dict[int, float]:
        """How good the rounds on record are, as far as they were evaluated by this metric."""
        found = {one["round"]: self.value(one) for one in history if self.by(one)[0] in one}
        return {round: value for round, value in found.items() if value is not None}

    def by(self, record: Record) -> tuple[str, str]:
        """The metric, and whether the largest or the smallest is best."""
        metric = self.metric or ("test_accuracy" if "test_accuracy" in record else "test_loss")
        return metric, self.best or ("smallest" if metric.endswith(SMALL) else "largest")


@dataclass(frozen=True)
class Observe:
    """How often a run is evaluated and saved, on what, and when it is enough.

    With `per_client` every client is judged by itself as well (`fedge.per_client` says on what, and by which names).
    `metrics` are computed beside loss and accuracy: names of `fedge.metrics.METRICS`, ["f1", "auc"], or functions of
    outputs and targets, {"f1": f1}. They are `test_f1` in the records, and `train_f1` with `evaluate_train`. `until` is
    asked after every evaluated round and ends the run when it says why: Reached, Plateau, Spent, or a function of the
    records so far. It should depend on them alone, so that a resumed run ends the same. `keep` "best" keeps the model
    of the best evaluated round beside the last one, as `run.best` and in the run folder; Best("test_f1") says by what.
    """

    evaluate_every: int = 1
    evaluate_train: bool = False
    checkpoint_every: int = 10
    per_client: bool = False
    metrics: Mapping[str, Metric | str] | Sequence[str] = field(default_factory=dict)
    until: Until | None = None
    keep: Literal["last", "best"] | Best = "last"

    def __post_init__(self) -> None:
        if not isinstance(self.keep, Best):
            choice("keep", self.keep, ("last", "best"))
        for name in ("evaluate_every", "checkpoint_every"):
            at_least_one(name, getattr(self, name))
        for name, metric in self.functions.items():
            if not callable(metric):
                raise ValueError(f"metric {name!r} is {metric!r}, it must be a function of scores and labels")
            if name in TAKEN:
                raise ValueError(f"metric {name!r} is computed anyhow: choose another name than {', '.join(TAKEN)}")
        if self.until is not None and not callable(self.until):
            raise ValueError(f"until is {self.until!r}, it must be a function of the records, such as Plateau(10)")

    @property
    def functions(self) -> dict[str, Metric]:
        """The metrics by name, each a function."""
        return named(self.metrics)

    @property
    def best(self) -> Best | None:
        """How the best round is found, if it is kept."""
        return self.keep if isinstance(self.keep, Best) else Best() if self.keep == "best" else None

    def settings(self) -> dict[str, Any]:
        """As plain values, for the files of a run."""
        often = {name: getattr(self, name) for name in ("evaluate_every", "evaluate_train", "checkpoint_every")}
        often |= {"per_client": True} if self.per_client else {}
        named: dict[str, Any] = {"metrics": list(self.metrics)} if self.metrics else {}
        kept = self.keep if isinstance(self.keep, str) else _plain(self.keep)
        named |= {} if kept == "last" else {"keep": kept}
        return often | named | ({} if self.until is None else {"until": _plain(self.until)})


def _plain(until: Until | Best) -> Any:
    if is_dataclass(until) and not isinstance(until, type):
        return {"name": type(until).__name__.lower(), **{one.name: getattr(until, one.name) for one in fields(until)}}
    return getattr(until, "__name__", type(until).__name__)
