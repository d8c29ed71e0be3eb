"""`fedge reproduce --plan`: which runs there are, which are done, and how long the others may take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import mean

from fedge.cli.text import duration
from fedge.reproduce import Choices, Job
from fedge.reproduce.places import TUNE
from fedge.reproduce.store import Store
from fedge.reproduce.tables import step_of
from fedge.reproduce.tuning import grid, scope


def runs(jobs: Iterable[Job], store: Store) -> Iterator[str]:
    """A line a run."""
    for job in jobs:
        step = step_of(job.config["algorithm"])
        yield f"{_state(store.find(job.key) is not None)} {job}, {step}, {job.rounds} rounds"


def tunings(jobs: Iterable[Job], chosen: Choices) -> Iterator[str]:
    """A line a method that is tuned."""
    for job in jobs:
        known = chosen.lines.get((scope(job.cell), job.method), {})
        what = f"{TUNE} {scope(job.cell)}, {job.method}, {len(grid(job.method))} settings, {job.rounds} rounds"
        yield f"{_state(known.get('rounds', 0) >= job.rounds)} {what}"


def done(jobs: Iterable[Job], store: Store) -> str:
    """How many runs there are and have a result, each counted once."""
    keys = {job.key for job in jobs}
    return f"{sum(store.find(key) is not None for key in keys)} of {len(keys)} runs are done"


def summary(jobs: list[Job], store: Store) -> str:
    """How many are done, and how long the others take, judged by their like in this store."""
    left = [job for key, job in {job.key: job for job in jobs}.items() if store.find(key) is None]
    text = done(jobs, store)
    paces = [_pace(job, store) for job in left]
    known = [pace * job.rounds for pace, job in zip(paces, left, strict=True) if pace is not None]
    if not known:
        return text
    of = "the others take" if len(known) == len(left) else f"{len(known)} of the others take"
    return f"{text}; {of} about {duration(sum(known))} one after another, as long as the like did here"


def _state(is_done: bool) -> str:
    return f"{'done' if is_done else 'to do':6}"


def _pace(job: Job, store: Store) -> float | None:
    """Seconds a round, with the start, that other seeds of the same run took."""
    alike = [line for line in store.lines if (line.get("cell"), line.get("label")) == (job.cell, job.label)]
    paces = [line["seconds"] / line["rounds"] for line in alike if line.get("seconds")]
    return mean(paces) if paces else None
