"""What a person sees while runs go on: live bars in a terminal, a few lines elsewhere, or nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column

from fedge.cli.text import duration, megabytes, pace, standing
from fedge.experiment import Progress, Watch
from fedge.runs.run import Record, Run

STOPPING = "Stopping after this phase; press Ctrl-C again to end at once."


class Display(Watch):
    """Shows progress while it is entered. This one shows nothing."""

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def stopping(self) -> None:
        """Ctrl-C was pressed. Runs inside the signal handler, so not through Python's buffers."""
        os.write(2, f"\n{STOPPING}\n".encode())


class Lines(Display):
    """A plain line about every tenth of the rounds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._seen: set[str] = set()  # runs that had a round

    def begin(self, label: str, progress: Progress) -> None:
        self._console.out(f"{label}: {progress.rounds} rounds", highlight=False)

    def round(self, label: str, progress: Progress, record: Record) -> None:
        if record.get("round", 1) > 1 and label not in self._seen:
            self._console.out(f"{label}: {_resumed(record)}", highlight=False)
        self._seen.add(label)
        tenths = [10 * done // progress.rounds for done in (progress.round - 1, progress.round)]
        if tenths[0] != tenths[1]:
            self._console.out(f"{label}: round {', '.join(filter(None, _cells(progress)))}", highlight=False)

    def end(self, label: str, progress: Progress, run: Run[Any]) -> None:
        if progress.pace is None and not run.stopped:
            self._console.out(f"{label}: was already finished", highlight=False)

    def fail(self, label: str, progress: Progress, reason: str) -> None:
        self._console.out(f"{label}: failed: {reason}", highlight=False)


class Live(Display):
    """One bar an algorithm."""

    def __init__(self, console: Console, labels: Sequence[str]) -> None:
        cells = [TextColumn(f"{{task.fields[cell{at}]}}", justify="right", markup=False) for at in range(5)]
        name = TextColumn(
            "{task.description}", markup=False, table_column=Column(no_wrap=True, max_width=20, overflow="ellipsis")
        )
        self._bars = Bars(
            name,
            BarColumn(12, complete_style="cyan", finished_style="green", pulse_style="dim"),
            *cells,
            console=console,
        )
        self._seen: set[str] = set()  # runs that had a round
        self._tasks: dict[str, TaskID] = {
            label: self._bars.add_task(label, total=None, start=False, **_fields(["waiting"])) for label in labels
        }

    def __enter__(self) -> Live:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def begin(self, label: str, progress: Progress) -> None:
        self._bars.start_task(self._tasks[label])
        self._show(label, progress, ["starting"])

    def round(self, label: str, progress: Progress, record: Record) -> None:
        if record.get("round", 1) > 1 and label not in self._seen:
            self._bars.console.print(f"{label}: {_resumed(record)}", markup=False, highlight=False)
        self._seen.add(label)
        self._show(label, progress, _cells(progress))

    def end(self, label: str, progress: Progress, run: Run[Any]) -> None:
        *cells, _ = _cells(progress)
        self._show(label, progress, [*cells, "stopped" if run.stopped else "done"])

    def fail(self, label: str, progress: Progress, reason: str) -> None:
        self._show(label, progress, [f"{progress.round}/{progress.rounds}", "failed"])

    def stopping(self) -> None:
        self._bars.console.print(STOPPING, highlight=False)

    def _show(self, label: str, progress: Progress, cells: Sequence[str]) -> None:
        self._bars.update(self._tasks[label], total=progress.rounds, completed=progress.round, **_fields(cells))


def _resumed(record: Record) -> str:
    """Said at the first round: the round of the checkpoint is not known before."""
    return f"going on after round {record['round'] - 1}"


def _cells(progress: Progress) -> list[str]:
    reached = standing(progress.accuracy, progress.loss, "acc ")
    speed = "" if progress.pace is None else pace(progress.pace)
    left = f"{duration(progress.left or 0)} left"
    if progress.diverged or progress.round == progress.rounds:
        left = "diverged" if progress.diverged else "done"
    return [f"{progress.round}/{progress.rounds}", reached, f"{megabytes(progress.megabytes)} MB", speed, left]


def _fields(cells: Sequence[str]) -> dict[str, Any]:
    return {f"cell{at}": cells[at] if at < len(cells) else "" for at in range(5)}
