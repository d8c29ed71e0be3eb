"""The end of a comparison: the table a person reads, and the object a program reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from fedge.cli.text import megabytes, percent
from fedge.experiment import Outcome
from fedge.report import default_target, read_all, to_target

Row = dict[str, Any]


def rows(outcomes: Sequence[Outcome], target: float | None) -> tuple[list[Row], float | None]:
    """One summary a run, with what it took to the target, and the target (by default the report's)."""
    runs = read_all([outcome.folder for outcome in outcomes])
    goal = default_target(runs) if target is None else target
    found = [_row(outcome) for outcome in outcomes]
    for row, run in zip(found, runs, strict=True):
        reached = None if goal is None else to_target(run, goal)
        row["rounds_to_target"] = None if reached is None else reached.round
        row["megabytes_to_target"] = None if reached is None else reached.megabytes
    return found, goal


def _row(outcome: Outcome) -> Row:
    run = outcome.run
    return {"label": outcome.label, "folder": str(outcome.folder), "stopped": run.stopped, **run.summary()}


def table(found: Sequence[Row], goal: float | None) -> Table:
    """Algorithms down, results across."""
    shown = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), show_edge=False)
    shown.add_column("algorithm", overflow="fold", min_width=9)
    head = ["rounds", "final\nacc. %", "best\nacc. %", "MB\nup", "MB\ndown"]
    if goal is not None:
        head += [f"rounds\nto {100 * goal:.3g} %", f"MB\nto {100 * goal:.3g} %"]
    for title in [*head, "seconds"]:
        shown.add_column(title, justify="right", no_wrap=True)
    for row in found:
        shown.add_row(*_cells(row, goal is not None))
    return shown


def _cells(row: Row, goal: bool) -> list[str]:
    cells = [row["label"], str(row["rounds"]), percent(row["final_accuracy"]), percent(row["best_accuracy"])]
    cells += [megabytes(row["up_bytes"] / 1e6), megabytes(row["down_bytes"] / 1e6)]
    if goal:
        rounds, moved = row["rounds_to_target"], row["megabytes_to_target"]
        cells += ["–", "–"] if rounds is None else [str(rounds), megabytes(moved)]
    return [*cells, f"{row['seconds']:.1f}"]
