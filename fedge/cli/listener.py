"""What `fedge reproduce` and sweeps say while they are at work."""

from __future__ import annotations

import time

from rich.console import Console
from rich.status import Status

from fedge.cli.text import pace, percent, say, standing
from fedge.runs.run import Record
from fedge.sweep.processes import Tuning, Unit
from fedge.sweep.runner import Listener, Named
from fedge.sweep.store import Line, collapsed

MINUTE = 60.0


class Say(Listener):
    """One line per run, and the round it is at: in a terminal always, elsewhere one line per minute."""

    def __init__(self, console: Console, status: Status) -> None:
        self._console, self._status = console, status
        self._seen: set[str] = set()
        self.rounds = 0  # since the command began
        self._left = self._processes = 0
        self._spoke = time.perf_counter()

    def begin(self, entry: Named) -> None:
        self._now(f"{entry}: starting", always=True)

    def _now(self, what: str, always: bool = False) -> None:
        self._status.update(what)
        if not self._console.is_terminal and (always or time.perf_counter() > self._spoke + MINUTE):
            self._spoke = time.perf_counter()
            say(self._console, what)

    def round(self, entry: Named, record: Record) -> None:
        if str(entry) not in self._seen and record["round"] > 1:
            say(self._console, f"{entry}: going on after round {record['round'] - 1}")
        self._seen.add(str(entry))
        self.rounds += 1
        shown = standing(record.get("test_accuracy"), record.get("test_loss"))
        self._now(f"{entry}: round {record['round']} of {entry.rounds}{shown and f', {shown}'}")

    def several(self, units: int, processes: int) -> None:
        self._left, self._processes = units, processes
        self._status.update(f"{units} to do, {min(units, processes)} at a time")

    def done(self, unit: Unit, line: Line | None) -> None:
        """A process came to the end of a unit."""
        self.several(self._left - 1, self._processes)
        if isinstance(unit, Tuning):
            say(self._console, f"{unit.dataset}, {unit.method}: tuned")
        elif line is not None:
            self.end(unit, line, new=True)

    def end(self, entry: Named, line: Line, new: bool) -> None:
        say(self._console, f"{entry}: {outcome(line)}{'' if new else ' (was done)'}")


def outcome(line: Line) -> str:
    if line["failed"]:
        return f"failed: {line['failed']}"
    after = "a round" if line["rounds"] == 1 else f"{line['rounds']} rounds"
    fallen = f", collapsed from {percent(line['best_accuracy'])} %" if collapsed(line) else ""
    reached = standing(line["final_accuracy"], line.get("final_loss")) or "not evaluated"
    return f"{reached} after {after}{fallen}, {pace(line['seconds_a_round'])} (median)"
