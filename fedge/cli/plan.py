"""`fedge reproduce --plan`: which runs there are, which are done, and how long the others may take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import mean
from typing import Any

from fedge.cli.text import duration
from fedge.sweep import Choices, Entry, Files, Runner, Store
from fedge.sweep.entries import step_of
from fedge.sweep.files import TUNE, scope
from fedge.sweep.store import Line


def runs(entries: Iterable[Entry], runner: Runner) -> Iterator[str]:
    """One line per run."""
    for entry in entries:
        state = _state(runner.store.find(entry.key) is not None, runner.is_begun(entry))
        yield f"{state} {entry}, {step_of(entry.config['algorithm'])}, {_rounds(entry)}"


def tunings(entries: Iterable[Entry], files: Files, chosen: Choices) -> Iterator[str]:
    """One line per method that is tuned."""
    for entry in entries:
        known = chosen.lines.get((scope(entry.cell), entry.method), {})
        what = f"{TUNE} {scope(entry.cell)}, {entry.method}, {len(files.grid(entry.method))} settings, {_rounds(entry)}"
        yield f"{_state(known.get('rounds', 0) >= entry.rounds)} {what}"


def done(entries: list[Entry], store: Store) -> str:
    """How many runs there are and have a result, each counted once."""
    keys = {entry.key for entry in entries}
    text = f"{sum(store.find(key) is not None for key in keys)} of {len(keys)} runs are done"
    return text if len(keys) == len(entries) else f"{text} (one that several tables want counts once)"


def summary(entries: list[Entry], store: Store, hardware: str, engine: dict[str, Any]) -> str:
    """How many are done, and how long the others take here, judged by other seeds of the same runs in this store."""
    every = {entry.key: entry for entry in entries}
    text, times = done(entries, store), []
    for entry in every.values():
        if store.find(entry.key) is None:
            alike = [store.find(one.key) for one in entries if _but_for_the_seed(one) == _but_for_the_seed(entry)]
            times.append([_seconds(line) for line in alike if line and _here(line, hardware, engine)])
    known = [mean(found) for found in times if found]
    if not known:
        return text
    of = "the others" if len(known) == len(times) else f"{len(known)} of the {len(times)} others"
    return f"{text}; on this machine ({hardware}) other seeds of {of} took about {duration(sum(known))} in all"


def _rounds(entry: Entry) -> str:
    return "1 round" if entry.rounds == 1 else f"{entry.rounds} rounds"


def _but_for_the_seed(entry: Entry) -> tuple[str, str, str]:
    return entry.experiment, entry.cell, entry.label


def _here(line: Line, hardware: str, engine: dict[str, Any]) -> bool:
    return line["hardware"] == hardware and line["engine"] == engine and bool(line.get("seconds"))


def _seconds(line: Line) -> float:
    """What a run took of a machine that it shared with others."""
    return float(line["seconds"] / line.get("at_a_time", 1))


def _state(is_done: bool, is_begun: bool = False) -> str:
    return f"{'done' if is_done else 'begun' if is_begun else 'to do':6}"
