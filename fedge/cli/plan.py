"""`fedge reproduce --plan`: which runs there are, which are done, and how long the others may take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import mean
from typing import Any

from fedge.cli.text import duration
from fedge.reproduce import Campaign, Choices, Job
from fedge.reproduce.places import TUNE
from fedge.reproduce.store import Line, Store
from fedge.reproduce.tables import step_of
from fedge.reproduce.tuning import grid, scope


def runs(jobs: Iterable[Job], campaign: Campaign) -> Iterator[str]:
    """A line a run."""
    for job in jobs:
        state = _state(campaign.store.find(job.key) is not None, campaign.is_begun(job))
        yield f"{state} {job}, {step_of(job.config['algorithm'])}, {_rounds(job)}"


def tunings(jobs: Iterable[Job], chosen: Choices) -> Iterator[str]:
    """A line a method that is tuned."""
    for job in jobs:
        known = chosen.lines.get((scope(job.cell), job.method), {})
        what = f"{TUNE} {scope(job.cell)}, {job.method}, {len(grid(job.method))} settings, {_rounds(job)}"
        yield f"{_state(known.get('rounds', 0) >= job.rounds)} {what}"


def done(jobs: list[Job], store: Store) -> str:
    """How many runs there are and have a result, each counted once."""
    keys = {job.key for job in jobs}
    text = f"{sum(store.find(key) is not None for key in keys)} of {len(keys)} runs are done"
    return text if len(keys) == len(jobs) else f"{text} (one that several tables want counts once)"


def summary(jobs: list[Job], store: Store, hardware: str, engine: dict[str, Any]) -> str:
    """How many are done, and how long the others take here, judged by other seeds of the same runs in this store."""
    every = {job.key: job for job in jobs}
    text, times = done(jobs, store), []
    for job in every.values():
        if store.find(job.key) is None:
            alike = [store.find(one.key) for one in jobs if _but_for_the_seed(one) == _but_for_the_seed(job)]
            times.append([_seconds(line) for line in alike if line and _here(line, hardware, engine)])
    known = [mean(found) for found in times if found]
    if not known:
        return text
    of = "the others" if len(known) == len(times) else f"{len(known)} of the {len(times)} others"
    return f"{text}; on this machine ({hardware}) other seeds of {of} took about {duration(sum(known))} in all"


def _rounds(job: Job) -> str:
    return "1 round" if job.rounds == 1 else f"{job.rounds} rounds"


def _but_for_the_seed(job: Job) -> tuple[str, str, str]:
    return job.experiment, job.cell, job.label


def _here(line: Line, hardware: str, engine: dict[str, Any]) -> bool:
    return line["hardware"] == hardware and line["engine"] == engine and bool(line.get("seconds"))


def _seconds(line: Line) -> float:
    """What a run took of a machine that it shared with others."""
    return float(line["seconds"] / line.get("at_a_time", 1))


def _state(is_done: bool, is_begun: bool = False) -> str:
    return f"{'done' if is_done else 'begun' if is_begun else 'to do':6}"
