"""Which way to compute clients on a CPU: measured on the real work, before the first phase.

A choice may cost as long as one round of plain clients, or a twentieth of the run.

    stacked    many clients at once, batched, recorded
    single     one client after another, by one worker per core, recorded
    plain      the same without recordings: what a loop over clients would do

Which is fastest depends on the model and the batches: convolutions are faster one by one, small recurrent layers and
transformers stacked, and a step of thousands of operations is slower recorded than plain.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

from fedge.checks import choice
from fedge.engine.recording.reasons import reason
from fedge.engine.recording.recorder import at_once, unrecorded

log = logging.getLogger("fedge")

Way = Literal["stacked", "single", "plain"]
WAYS: tuple[Way, ...] = get_args(Way)

STEPS = 2  # local steps of a trial
SLICE = 32  # clients of a trial at most
LOOKS = 3  # turns at most before anything is recorded
WARM = 4  # trials at most until a step is recorded: the first records it, the second compares it
TIMED = 5  # turns at most, of which the fastest counts
ENOUGH = 2.0  # seconds of turns after which no further one begins, if there were two
BEHIND = 1.5  # a way that took so many times as long as another one has lost
MARGIN = 0.9  # another way than the first has to take less than this share of its time
CLEAR = 0.6  # one client after another, recorded, takes 0.5 to 0.8 of the time that it takes plain, on one core
RECORDING = {"stacked": 10, "single": 25}  # times a trial that is not recorded: what a recording costs, as measured

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
    """One way on `jobs` clients: `run` does a few of their steps, and the result is thrown away.

    `clock`: that on the wall sees the work of all threads, and their waiting; of one thread CPU time says more, because
    other work on the machine is not in it.
    """

    def __init__(
        self,
        run: Callable[[], object],
        recorded: Callable[[], bool],
        jobs: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.run, self.recorded, self.jobs, self.clock = run, recorded, jobs, clock

    def warm(self) -> None:
        """Until everything that will be recorded is."""
        with at_once():
            for _ in range(WARM):
                self.run()
                if self.recorded():
                    break

    def once(self) -> float:
        """Seconds per client."""
        begin = self.clock()
        self.run()
        return (self.clock() - begin) / self.jobs


Allowed = Callable[[float], float]  # seconds of a trial per client, plain -> seconds that a choice may take


def fastest(trials: Mapping[Way, Trial], clear: float = 0.0, allowed: Allowed = lambda _: math.inf) -> Way:
    """The way that took the least time; the first of them if it is nearly as fast. Says so in one line.

    Recording a step takes as long as dozens of steps. So clients stacked and clients plain are looked at first, neither
    recorded: if stacked ones take less than `clear` of the time, they are chosen, and if recordings would take longer
    than is `allowed`, the better of these. Else all ways are recorded and measured.
    """
    begin = time.perf_counter()
    contest = _Contest(trials)
    contest.look(clear)
    stacked, plain = (contest.seconds.get(way, math.inf) for way in ("stacked", "plain"))
    if stacked < clear * plain:
        return contest.won("stacked")
    spent = time.perf_counter() - begin
    if math.isfinite(plain) and spent + contest.recordings() > allowed(plain):
        first = contest.first()
        return contest.won("single" if first == "stacked" and stacked > MARGIN * plain else first)
    return contest.measure()


class _Contest:
    """Ways that take turns: a while in which the machine is slow must not meet one of them alone.

    A way that fails is left out, and said; if all of them fail, the first error is raised.
    """

    def __init__(self, trials: Mapping[Way, Trial]) -> None:
        self.trials = dict(trials)
        self.seconds: dict[Way, float] = {}  # of the fastest turn
        self.errors: dict[Way, Exception] = {}

    def first(self) -> Way:
        return next(iter(self.trials))

    def recordings(self) -> float:
        """Seconds that recordings would take which the first way does not need."""
        lasts = {"stacked": self.seconds.get("stacked", 0.0), "single": self.seconds.get("plain", 0.0)}
        others = [way for way in list(self.trials)[1:] if way in lasts]
        return sum(RECORDING[way] * lasts[way] * self.trials[way].jobs for way in others)

    def look(self, clear: float) -> None:
        """Turns of clients stacked and clients plain, nothing recorded, until it is clear whether it is clear."""
        if not {"stacked", "plain"} <= set(self.trials):
            return
        with unrecorded():
            ways = self._try(("plain", "stacked"), lambda trial: trial.run())
            for _ in range(LOOKS if len(ways) == 2 else 1):
                self._turn(ways)
                stacked, plain = (self.seconds.get(way, math.inf) for way in ("stacked", "plain"))
                if not 0.7 * clear * plain < stacked < BEHIND * plain:
                    break

    def measure(self) -> Way:
        """The winner among recorded ways."""
        self.seconds = {}
        ways = self._try(tuple(self.trials), lambda trial: trial.warm())
        if not ways:
            raise next(self.errors[way] for way in self.trials)
        begin, turns = time.perf_counter(), 0
        while turns < 2 or (turns < TIMED and time.perf_counter() - begin < ENOUGH):
            self._turn(ways)
            best, turns = min(self.seconds.values()), turns + 1
            ways = [way for way in ways if self.seconds[way] < BEHIND * best]
        first, best_way = next(iter(self.seconds)), min(self.seconds, key=lambda way: self.seconds[way])
        return self.won(best_way if self.seconds[best_way] < MARGIN * self.seconds[first] else first)

    def won(self, way: Way) -> Way:
        figures = ", ".join(f"{one} {1e3 * seconds:.2f} ms" for one, seconds in self.seconds.items())
        log.info("clients are computed in the way '%s' (per client and up to %d steps: %s)", way, STEPS, figures)
        return way

    def _turn(self, ways: Iterable[Way]) -> None:
        for way in ways:
            self.seconds[way] = min(self.seconds.get(way, math.inf), self.trials[way].once())

    def _try(self, ways: Iterable[Way], what: Callable[[Trial], object]) -> list[Way]:
        """Those that do not fail."""
        works: list[Way] = []
        for way in ways:
            try:
                what(self.trials[way])
                works.append(way)
            except Exception as error:
                self.errors[way] = error
        if works:
            for way in [way for way in ways if way in self.errors]:
                self._leave_out(way, self.errors[way])
        return works

    def _leave_out(self, way: Way, error: Exception) -> None:
        del self.trials[way]
        log.warning("the way '%s' fails for this model and is left out: %s", way, reason(error))
