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
from collections.abc import Callable, Mapping
from typing import Literal, get_args

from fedge.checks import choice

log = logging.getLogger("fedge")

Way = Literal["stacked", "single", "plain"]
WAYS: tuple[Way, ...] = get_args(Way)

STEPS = 2  # local steps of a trial
WARM = 4  # trials at most until a step is recorded: the first records it, the second compares it
TIMED = 4  # turns, of which the fastest counts
MARGIN = 0.9  # another way than the first has to take less than this share of its time


def check_way(way: str | None, chunk: int | None) -> None:
    if way is not None:
        choice("way", way, WAYS)
    if way in ("single", "plain") and chunk not in (None, 1):
        raise ValueError(f"way is {way!r}, which is one client at a time, but chunk is {chunk}: leave one of them out")


class Trial:
    """One way on a few clients: `run` does a few of their steps, and the result is thrown away."""

    def __init__(self, run: Callable[[], object], recorded: Callable[[], bool], jobs: float) -> None:
        self.run, self.recorded, self.jobs = run, recorded, jobs

    def warm(self) -> None:
        """Until everything that will be recorded is."""
        for _ in range(WARM):
            self.run()
            if self.recorded():
                break

    def once(self) -> float:
        """Seconds per client, of this thread's own time: other programs on the machine do not count."""
        begin = time.thread_time()
        self.run()
        return (time.thread_time() - begin) / self.jobs


def fastest(trials: Mapping[Way, Trial]) -> Way:
    """The way that took the least time; the first of them if it is nearly as fast. Says so in one line.

    They take turns: a while in which the machine is slow must not meet one of them alone.
    """
    for trial in trials.values():
        trial.warm()
    turns = [{way: trial.once() for way, trial in trials.items()} for _ in range(TIMED)]
    found = {way: min(turn[way] for turn in turns) for way in trials}
    first, best = next(iter(found)), min(found, key=lambda way: found[way])
    chosen = best if found[best] < MARGIN * found[first] else first
    figures = ", ".join(f"{way} {1e3 * seconds:.2f} ms" for way, seconds in found.items())
    log.info("clients are computed in the way '%s' (per client and up to %d steps: %s)", chosen, STEPS, figures)
    return chosen
