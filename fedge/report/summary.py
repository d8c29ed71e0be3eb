"""The numbers of a table: columns are functions of a run, rows are groups, and a column nobody fills is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from fedge.report.groups import Group, spread
from fedge.report.read import RunFolder
from fedge.report.series import (
    best_accuracy,
    curve,
    elapsed,
    final_metric,
    is_number,
    last,
    megabytes,
    recorded,
    to_target,
)

Cell = str | None


class Column(NamedTuple):
    """A number of a run, and how it is written."""

    title: str
    value: Callable[[RunFolder], object]
    text: Callable[[float], str]


def summary_rows(groups: Sequence[Group], wanted: Sequence[Column]) -> tuple[list[str], list[list[Cell]]]:
    """The titles and the cells, without columns that nobody fills."""
    several = any(group.seeds > 1 for group in groups)
    titles = ["algorithm", *(["runs"] if several else []), "rounds", *(column.title for column in wanted)]
    cells: list[list[Cell]] = [
        [group.label, *([str(group.seeds)] if several else []), _rounds(group), *(cell(group, one) for one in wanted)]
        for group in groups
    ]
    filled = [at for at in range(len(titles)) if any(row[at] is not None for row in cells)]
    return [titles[at] for at in filled], [[row[at] for at in filled] for row in cells]


def cell(group: Group, column: Column) -> Cell:
    """`91.3`, `91.3 ± 0.4`, or `12 ± 1 (2 of 3)` where a run has no such number; no spread where all are equal.

    A run that failed has none: its accuracy, however large, is not a result. One that is not done counts only where
    none is: half-trained runs would pull the mean of the others.
    """
    done = any(run.finished and not run.failed for run in group.runs)
    counts = [not run.failed and (run.finished or not done) for run in group.runs]
    made = [column.value(run) if one else None for run, one in zip(group.runs, counts, strict=True)]
    values = [value if is_number(value) else None for value in made]
    found = spread(values)
    if found is None:
        return None
    text = column.text(found.mean)
    if found.deviation and found.deviation > 1e-9 * abs(found.mean):
        text += f" ± {_with_digits_of(text, column.text(found.deviation))}"
    return text if found.runs == group.seeds else f"{text} ({found.runs} of {group.seeds})"


def _with_digits_of(text: str, other: str) -> str:
    """A spread with as many digits after the point as its mean, and at least one."""
    digits = max(1, len(text.partition(".")[2]))
    return f"{float(other.replace(',', '')):,.{digits}f}"


def columns(target: float | None, metrics: Sequence[str] = ()) -> list[Column]:
    """Of every run: accuracies, metrics of the user's own, bytes, time, and what it took to reach the target."""
    found = [
        Column(
            "final test accuracy (%)", lambda run: _stated(run, "final_accuracy", last(run, "test_accuracy")), hundred
        ),
        Column("best test accuracy (%)", lambda run: _stated(run, "best_accuracy", best_accuracy(run)), hundred),
        Column(
            "final train accuracy (%)",
            lambda run: _stated(run, "final_train_accuracy", last(run, "train_accuracy")),
            hundred,
        ),
        Column("final test loss", _loss, four_digits),
        *(Column(f"final test {name}", partial(final_metric, name=name), four_digits) for name in metrics),
        Column("epsilon", lambda run: last(run, "epsilon"), lambda value: f"{value:.3g}"),
        Column("delta", lambda run: last(run, "delta"), lambda value: f"{value:.1e}"),
        Column("MB up", lambda run: megabytes(run, "up"), number),
        Column("MB down", lambda run: megabytes(run, "down"), number),
        Column("MB in total", lambda run: megabytes(run, "up") + megabytes(run, "down"), number),
        Column("seconds", lambda run: (elapsed(run, "seconds") or [0.0])[-1], seconds),
        Column("seconds on the devices", lambda run: _spent(run, "virtual_seconds"), number),
        Column("joules", lambda run: _spent(run, "joules"), number),
    ]
    return found if target is None else found + target_columns(target)


def target_columns(target: float) -> list[Column]:
    def taken(run: RunFolder, at: int) -> float | None:
        found = to_target(run, target)
        return None if found is None else found[at]

    goal = f"to {100 * target:.4g}\u00a0%"
    return [
        Column(f"rounds {goal}", lambda run: taken(run, 0), count),
        Column(f"MB {goal}", lambda run: taken(run, 1), number),
        Column(f"seconds {goal}", lambda run: taken(run, 2), seconds),
        Column(f"seconds on the devices {goal}", lambda run: taken(run, 3), number),
        Column(f"joules {goal}", lambda run: taken(run, 4), number),
    ]


def _spent(run: RunFolder, what: Literal["virtual_seconds", "joules"]) -> float | None:
    """In all rounds, if the run has a clock."""
    return elapsed(run, what)[-1] if run.rounds and recorded(run, what) else None


def _rounds(group: Group) -> str:
    """`50`, or how far it is: `12 of 50, unfinished`; of several runs, the last one that failed or is not done."""
    failed = [run for run in group.runs if run.failed]  # also one that went to its end, and diverged
    open_ = failed or [run for run in group.runs if not run.finished]
    if not open_:
        return " or ".join(dict.fromkeys(str(len(run.rounds)) for run in group.runs))
    run = open_[-1]
    train = run.config.get("train")
    planned = train.get("rounds") if isinstance(train, dict) else None
    how = "failed" if run.failed else "unfinished"
    count = f"{len(open_)} of {group.seeds} runs {how}: " if group.seeds > 1 else ""
    return f"{count}{len(run.rounds)} of {planned or '?'}{'' if count else f', {how}'}"


def _stated(run: RunFolder, key: str, otherwise: object) -> object:
    """What the summary says; an unfinished run has none."""
    stated = run.summary.get(key)
    return otherwise if stated is None else stated


def _loss(run: RunFolder) -> object:
    """Of runs without an accuracy, which have nothing else to show."""
    return None if curve(run, "test_accuracy").y else _stated(run, "final_loss", last(run, "test_loss"))


def four_digits(value: float) -> str:
    return f"{value:.4g}"


def hundred(fraction: float) -> str:
    """In percent."""
    return f"{100 * fraction:.1f}"


def count(value: float) -> str:
    """A whole number as it is, a mean of some with one digit after the point."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def seconds(value: float) -> str:
    """One digit after the point, as `fedge run` prints them: 0.4, 12.3, 12,345.0."""
    return f"{value:,.1f}"


def number(value: float) -> str:
    """Three digits or all before the point: 0.0123, 1.23, 12.3, 123, 12,345."""
    if value == int(value) or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 1 else f"{value:.{2 if value < 10 else 1}f}"
