"""One round: a flow driven over the link, which may be left between two phases, and a new state that is of use."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from fedge import tree
from fedge.core import Ask, At, Progress, S, drive
from fedge.engine import TooFewReplies
from fedge.engine.links.base_link import Around, BaseLink, Replies
from fedge.engine.links.nobody import NobodyDrawn
from fedge.loop.drawing import Draw
from fedge.runs.record import record_of
from fedge.runs.run import Record, Run


class Stop(Exception):
    """Raised between two phases when the user asked to stop."""


class Interruptible(Around):
    """A link that can be left between two phases: not after the last one of a round, whose work would be lost."""

    def __init__(self, inner: BaseLink, stop: Callable[[], bool] | None) -> None:
        super().__init__(inner)
        self.stop = inner.stopping(stop)
        self.progress = Progress()  # of the round so far
        self.asked = False  # whether to stop, for the phase that comes

    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Replies:
        if not self.asked and self.stop():
            raise Stop
        self.asked = False
        if at.phase == 0:
            self.progress = Progress()
        self.progress.cohort |= set(clients.tolist())
        replies, dropped = self.inner.ask(at, asks, clients)
        self.progress.dropped += dropped
        return replies, dropped

    def advance(self, state: Any, seed: int, round: int, size: int) -> tuple[Any, Progress] | None:
        if self.stop():
            raise Stop
        self.progress = Progress()
        found = self.inner.advance(state, seed, round, size)
        self.asked = found is None  # an ordinary round: its first phase begins now
        return found


class Unusable(TooFewReplies):
    """Good uploads that the server can make no state of: the round is skipped as one without enough of them is."""


HINT = "lower the step size, or combine uploads by a robust rule (fedge.Robust). The rounds before it are kept"


def check_finite(state: Any) -> None:
    """Refuse a state that holds NaN or infinity: nothing can be trained from it, and the one before is still there."""
    if not tree.is_finite(state):
        raise Unusable(f"the new state is not finite, although every upload was: {HINT}")


def one_round(run: Run[S], link: BaseLink, seed: int, number: int, draw: Draw, size: int) -> Record:
    """Advance the run by one round and say what happened."""
    begin, before = time.perf_counter(), len(run.ledger)
    try:
        found = link.advance(run.state, seed, number, size)
        if found is None:
            found = drive(run.algorithm.round(run.state), link, seed, number, draw)
    except NobodyDrawn:
        found = run.state, Progress()
    except LinAlgError as error:  # of numbers that are finite, and whose squares are not
        what = " ".join(str(error).split())[:200]
        raise Unusable(f"the server cannot compute with the uploads, {what.rstrip('.')}: {HINT}") from error
    state, progress = found
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    check_finite(state)
    run.state = state
    return record_of(run, link, progress, number, run.ledger.rows[before:], begin)
