"""Which way to compute clients on a CPU: measured on the real work, before the first phase.

    stacked    many clients at once, batched, recorded
    single     one client after another, by one worker per core, recorded
    plain      the same without recordings: what a loop over clients would do

Which is fastest depends on the model and the batches: convolutions are faster one by one, small recurrent layers and
transformers stacked, and a step of thousands of operations is slower recorded than plain.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

from fedge.checks import choice

log = logging.getLogger("fedge")

Way = Literal["stacked", "single", "plain"]
WAYS: tuple[Way, ...] = get_args(Way)

STEPS = 2  # local steps of a trial
WARM = 4  # trials at most until a step is recorded: the first records it, the second compares it
TIMED = 5  # turns at most, of which the fastest counts
ENOUGH = 2.0  # seconds of turns after which no further one begins, if there were two
MARGIN = 0.9  # another way than the first has to take less than this share of its time

# in errors that a loop over clients has not
_STACKING = ("vmap", "functorch", "Batching rule", "modified inplace", "cannot be stacked")


def check_way(way: str | None, chunk: int | None) -> None:
    if way is not None:
        choice("way", way, WAYS)
    if way in ("single", "plain") and chunk not in (None, 1):
        raise ValueError(f"way is {way!r}, which is one client at a time, but chunk is {chunk}: leave one of them out")


class NotStackable(RuntimeError):
    """A model whose clients cannot be computed at once; says what to do."""


@contextmanager
def stacking() -> Iterator[None]:
    """Within it, errors that come from stacking alone name the way that has none."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in _STACKING):
            raise
        line = str(error).partition("\n")[0]
        raise NotStackable(
            "the model does what cannot be done for many clients at once, such as a branch, a size or an index that "
            f'depends on values: way="single" computes one client after another ({line})'
        ) from error


class Trial:
    """One way on `jobs` clients: `run` does a few of their steps, and the result is thrown away."""

    def __init__(self, run: Callable[[], object], recorded: Callable[[], bool], jobs: float) -> None:
        self.run, self.recorded, self.jobs = run, recorded, jobs

    def warm(self) -> None:
        """Until everything that will be recorded is."""
        for _ in range(WARM):
            self.run()
            if self.recorded():
                break

    def once(self) -> float:
        """Seconds per client as the clock on the wall has them: it sees the work of all threads, and their waiting."""
        begin = time.perf_counter()
        self.run()
        return (time.perf_counter() - begin) / self.jobs


def fastest(trials: Mapping[Way, Trial]) -> Way:
    """The way that took the least time; the first of them if it is nearly as fast. Says so in one line.

    They take turns: a while in which the machine is slow must not meet one of them alone. A way that fails is left
    out, and said; if all of them fail, the first error is raised.
    """
    works = _working(trials)
    turns: list[dict[Way, float]] = []
    begin = time.perf_counter()
    while len(turns) < 2 or (len(turns) < TIMED and time.perf_counter() - begin < ENOUGH):
        turns.append({way: trial.once() for way, trial in works.items()})
    found = {way: min(turn[way] for turn in turns) for way in works}
    first, best = next(iter(found)), min(found, key=lambda way: found[way])
    chosen = best if found[best] < MARGIN * found[first] else first
    figures = ", ".join(f"{way} {1e3 * seconds:.2f} ms" for way, seconds in found.items())
    log.info("clients are computed in the way '%s' (per client and up to %d steps: %s)", chosen, STEPS, figures)
    return chosen


def _working(trials: Mapping[Way, Trial]) -> dict[Way, Trial]:
    """The ways that do not fail, warm."""
    works: dict[Way, Trial] = {}
    errors: dict[Way, Exception] = {}
    for way, trial in trials.items():
        try:
            trial.warm()
        except Exception as error:
            errors[way] = error
        else:
            works[way] = trial
    if not works:
        raise next(iter(errors.values()))
    for way, reason in errors.items():
        line = str(reason).partition("\n")[0]
        log.warning("the way '%s' fails for this model and is left out: %s: %s", way, type(reason).__name__, line)
    return works
