"""The end of a comparison: the table a person reads, and the object a program reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from fedge.cli.narrow import show, title_of
from fedge.cli.text import megabytes, percent, short
from fedge.experiment import Outcome
from fedge.report import default_target, read_all, to_target
from fedge.report.series import curve, final_metric, has_no_accuracy, telling_metrics
from fedge.runs.experiments import records

Row = dict[str, Any]
FAILED: Row = dict.fromkeys(["final_accuracy", "best_accuracy", "final_loss", "up_bytes", "down_bytes", "seconds"])
NOTHING = "–"


def with_rounds(outcomes: Sequence[Outcome]) -> list[Path]:
    """The folders that a report can be made of: a run may fail in its first round."""
    return [outcome.folder for outcome in outcomes if outcome.run is not None or records(outcome.folder)]


def rows(outcomes: Sequence[Outcome], target: float | None) -> tuple[list[Row], float | None]:
    """One summary per run, with what it took to the target, and the target (by default the report's)."""
    folders = with_rounds(outcomes)
    runs = read_all(folders) if folders else []
    goal = default_target(runs) if target is None or has_no_accuracy(runs) else target
    read = {run.path: run for run in runs}
    found = [_row(outcome) for outcome in outcomes]
    for row, outcome in zip(found, outcomes, strict=True):
        run = read.get(outcome.folder.resolve())
        reached = None if goal is None or run is None else to_target(run, goal)
        row["rounds_to_target"] = None if reached is None else reached.round
        row["megabytes_to_target"] = None if reached is None else reached.megabytes
        row["virtual_seconds_to_target"] = None if reached is None else reached.virtual_seconds
        row["joules_to_target"] = None if reached is None else reached.joules
        row["best_loss"] = None if run is None else min(curve(run, "test_loss").y, default=None)
        row["metrics"] = {} if run is None else {name: final_metric(run, name) for name in telling_metrics(runs)}
    return found, goal


def _row(outcome: Outcome) -> Row:
    run = outcome.run
    head = {"label": outcome.label, "folder": str(outcome.folder), "failed": outcome.failed}
    if run is None:
        return head | {"stopped": False, "rounds": len(records(outcome.folder)), **FAILED}
    return head | {"stopped": run.stopped, **run.summary()}


def print_table(console: Console, found: Sequence[Row], goal: float | None, folder: Path) -> None:
    """Algorithms down, results across; narrow, so that a name of 22 letters fits into 80 columns."""
    measured = _measured(found)
    head = ["algorithm", "rounds", *measured, "MB\nup", "MB\ndown"]
    wire = any(_wire(row) for row in found)
    if wire:
        head += ["wire\nMB up", "wire\nMB down"]
    if goal is not None:
        head += [f"rounds\nto {100 * goal:.3g}%", f"MB\nto {100 * goal:.3g}%"]
    if _timed(found):
        head += ["device\ns", "energy\nJ"]
        head += [] if goal is None else [f"device s\nto {100 * goal:.3g}%", f"energy J\nto {100 * goal:.3g}%"]
    cells = [_cells(row, list(measured.values()), goal is not None, wire, _timed(found)) for row in found]
    names = list(dict.fromkeys(name for row in found for name in row["metrics"]))
    show(console, [*head, "time\ns"], cells, names, f"in the report and in fedge.results({str(folder)!r})")


def _measured(found: Sequence[Row]) -> Mapping[str, Callable[[Row], str]]:
    """What says how good a run is, by title: accuracies, or where no run has one the loss; then the metrics."""
    names = list(dict.fromkeys(name for row in found for name in row["metrics"]))
    more = {title_of(name): partial(_metric, name=name) for name in names}
    if any(row["final_accuracy"] is not None for row in found) or not names:
        return {f"{one}\nacc %": partial(_accuracy, key=f"{one}_accuracy") for one in ("final", "best")} | more
    return {f"{one}\nloss": partial(_loss, key=f"{one}_loss") for one in ("final", "best")} | more


def _accuracy(row: Row, key: str) -> str:
    return percent(row[key])


def _loss(row: Row, key: str) -> str:
    return _digits(row[key])


def _metric(row: Row, name: str) -> str:
    return _digits(row["metrics"].get(name))


def _digits(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4g}"


def _timed(found: Sequence[Row]) -> bool:
    """Whether a clock ran: any row has virtual seconds."""
    return any(row.get("virtual_seconds") is not None for row in found)


def _wire(row: Row) -> bool:
    """Whether its messages took bytes that were counted: the simulator has none."""
    return row.get("wire_up_bytes") is not None


def _cells(row: Row, measured: Sequence[Callable[[Row], str]], goal: bool, wire: bool, timed: bool) -> list[str]:
    if row["failed"]:
        more = len(measured) + 2 * goal + 2 * wire + 2 * timed * (1 + goal)
        return [row["label"], str(row["rounds"]), "failed", *[NOTHING] * (2 + more)]
    cells = [row["label"], str(row["rounds"]), *(write(row) for write in measured)]
    cells += [megabytes(row["up_bytes"] / 1e6), megabytes(row["down_bytes"] / 1e6)]
    if wire:
        cells += [megabytes(row[f"wire_{way}_bytes"] / 1e6) if _wire(row) else NOTHING for way in ("up", "down")]
    if goal:
        rounds, moved = row["rounds_to_target"], row["megabytes_to_target"]
        cells += [NOTHING, NOTHING] if rounds is None else [str(rounds), megabytes(moved)]
    if timed:
        names = [f"{name}{end}" for end in ("", "_to_target")[: 1 + goal] for name in ("virtual_seconds", "joules")]
        cells += [short(row[name]) if row.get(name) else NOTHING for name in names]  # no time or energy is not known
    return [*cells, f"{row['seconds']:.1f}"]


def note(found: Sequence[Row], target: float | None = None) -> str:
    """What "final" is, and whence a target that nobody set, said under the table."""
    over = sorted({row["final_rounds"] for row in found if not row["failed"]})
    if not over:
        return ""
    final = "the last round" if over == [1] else f"mean of the last {' or '.join(map(str, over))} rounds"
    whence = f"; {100 * target:.3g}%: 90 % of the best accuracy, because no target is set" if target else ""
    return f"final: {final}{whence}"


def failures(found: Sequence[Row]) -> Iterator[str]:
    """Why runs failed, one line per run."""
    return (f"{row['label']} failed: {row['failed']}" for row in found if row["failed"])
