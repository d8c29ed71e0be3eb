"""The end of a comparison: the table a person reads, and the object a program reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from fedge.cli.text import megabytes, percent, short
from fedge.experiment import Outcome
from fedge.report import default_target, read_all, to_target
from fedge.runs.experiments import records

Row = dict[str, Any]
FAILED: Row = dict.fromkeys(["final_accuracy", "best_accuracy", "up_bytes", "down_bytes", "seconds"])
NOTHING = "–"


def with_rounds(outcomes: Sequence[Outcome]) -> list[Path]:
    """The folders that a report can be made of: a run may fail in its first round."""
    return [outcome.folder for outcome in outcomes if outcome.run is not None or records(outcome.folder)]


def rows(outcomes: Sequence[Outcome], target: float | None) -> tuple[list[Row], float | None]:
    """One summary per run, with what it took to the target, and the target (by default the report's)."""
    folders = with_rounds(outcomes)
    runs = read_all(folders) if folders else []
    goal = default_target(runs) if target is None else target
    read = {run.path: run for run in runs}
    found = [_row(outcome) for outcome in outcomes]
    for row, outcome in zip(found, outcomes, strict=True):
        run = read.get(outcome.folder.resolve())
        reached = None if goal is None or run is None else to_target(run, goal)
        row["rounds_to_target"] = None if reached is None else reached.round
        row["megabytes_to_target"] = None if reached is None else reached.megabytes
        row["virtual_seconds_to_target"] = None if reached is None else reached.virtual_seconds
        row["joules_to_target"] = None if reached is None else reached.joules
    return found, goal


def _row(outcome: Outcome) -> Row:
    run = outcome.run
    head = {"label": outcome.label, "folder": str(outcome.folder), "failed": outcome.failed}
    if run is None:
        return head | {"stopped": False, "rounds": len(records(outcome.folder)), **FAILED}
    return head | {"stopped": run.stopped, **run.summary()}


def table(found: Sequence[Row], goal: float | None) -> Table:
    """Algorithms down, results across; narrow, so that a name of 22 letters fits into 80 columns."""
    shown = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    shown.add_column("algorithm", overflow="fold", min_width=9)
    head = ["rounds", "final\nacc %", "best\nacc %", "MB\nup", "MB\ndown"]
    wire = any(_wire(row) for row in found)
    if wire:
        head += ["wire\nMB up", "wire\nMB down"]
    if goal is not None:
        head += [f"rounds\nto {100 * goal:.3g}%", f"MB\nto {100 * goal:.3g}%"]
    if _timed(found):
        head += ["device\ns", "energy\nJ"]
    for title in [*head, "time\ns"]:
        shown.add_column(title, justify="right", no_wrap=True)
    for row in found:
        shown.add_row(*_cells(row, goal is not None, wire, _timed(found)))
    return shown


def _timed(found: Sequence[Row]) -> bool:
    """Whether a clock ran: any row has virtual seconds."""
    return any(row.get("virtual_seconds") is not None for row in found)


def _wire(row: Row) -> bool:
    """Whether its messages took bytes that were counted: the simulator has none."""
    return row.get("wire_up_bytes") is not None


def _cells(row: Row, goal: bool, wire: bool, timed: bool) -> list[str]:
    if row["failed"]:
        more = 2 * goal + 2 * wire + 2 * timed
        return [row["label"], str(row["rounds"]), "failed", *[NOTHING] * (4 + more)]
    cells = [row["label"], str(row["rounds"]), percent(row["final_accuracy"]), percent(row["best_accuracy"])]
    cells += [megabytes(row["up_bytes"] / 1e6), megabytes(row["down_bytes"] / 1e6)]
    if wire:
        cells += [megabytes(row[f"wire_{way}_bytes"] / 1e6) if _wire(row) else NOTHING for way in ("up", "down")]
    if goal:
        rounds, moved = row["rounds_to_target"], row["megabytes_to_target"]
        cells += [NOTHING, NOTHING] if rounds is None else [str(rounds), megabytes(moved)]
    if timed:
        cells += [NOTHING if row.get(name) is None else short(row[name]) for name in ("virtual_seconds", "joules")]
    return [*cells, f"{row['seconds']:.1f}"]


def note(found: Sequence[Row]) -> str:
    """What "final" is, said under the table."""
    over = sorted({row["final_rounds"] for row in found if not row["failed"]})
    if not over or over == [1]:
        return "final: the last round" if over else ""
    return f"final: mean of the last {' or '.join(map(str, over))} rounds"


def failures(found: Sequence[Row]) -> Iterator[str]:
    """Why runs failed, one line per run."""
    return (f"{row['label']} failed: {row['failed']}" for row in found if row["failed"])
