"""Where a round's time goes, section by section: the clients' work, and all that is around it.

    ms of a section = the time between two marks, on the host's clock and in the GPU's own stream

A mark is set where a section begins and where it ends; what lies inside another section counts there alone. Marks
do not wait for the GPU, so that host and GPU overlap as they do in any round.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from fedge.engine import Simulator
from fedge.engine.clients.batches import Schedule
from fedge.engine.clients.directory import Directory
from fedge.engine.clients.run_task import Stacked
from fedge.engine.recording.replayed import Replayed
from fedge.engine.uploads.intake import Intake
from fedge.engine.uploads.streaming import Sums

REST = "cohort, server, ledger"
CLIENTS = ("draws", "gather", "start and finish", "steps", "fold")
SECTIONS: dict[str, tuple[tuple[type, str], ...]] = {
    "jobs": ((Directory, "jobs"),),
    "limits": ((Simulator, "intake"),),
    "draws": ((Schedule, "__init__"), (Schedule, "_at"), (Schedule, "_at_here"), (Schedule, "_at_in_c")),
    "gather": ((Simulator, "gather"),),
    "start and finish": ((Replayed, "__call__"),),
    "steps": ((Stacked, "__call__"),),
    "fold": ((Simulator, "_fold"),),
    "uploads": ((Intake, "take"), (Intake, "close")),
    "reply": ((Sums, "reply"),),
}


class Share(NamedTuple):
    """One section of a round in ms: on the host, and in the GPU's stream (None on a CPU)."""

    section: str
    host: float
    gpu: float | None
    clients: bool


class Marks:
    """The sections of one thread, as a list of (when, which from then on)."""

    def __init__(self, gpu: bool) -> None:
        self.gpu, self.thread = gpu, threading.get_ident()
        self.open = [REST]
        self.found: list[tuple[str, float, Any]] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True) if self.gpu else None
        if event is not None:
            event.record()
        self.found.append((self.open[-1], time.perf_counter(), event))

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        if threading.get_ident() != self.thread:  # workers side by side: the thread that waits for them counts
            yield
            return
        self.open.append(name)
        self.mark()
        try:
            yield
        finally:
            self.open.pop()
            self.mark()

    def shares(self, rounds: int) -> list[Share]:
        host, gpu = defaultdict[str, float](float), defaultdict[str, float](float)
        for (name, begin, first), (_, end, last) in zip(self.found, self.found[1:], strict=False):
            host[name] += 1e3 * (end - begin) / rounds
            gpu[name] += first.elapsed_time(last) / rounds if self.gpu else 0.0
        order = [REST, *SECTIONS]
        return [Share(n, host[n], gpu[n] if self.gpu else None, n in CLIENTS) for n in order if n in host]


def _noted(marks: Marks, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with marks.section(name):
            return function(*args, **kwargs)

    return call


def split(step: Callable[[], Any], device: str, rounds: int = 1) -> list[Share]:
    """The sections of so many rounds, on average; `step` does one of them."""
    gpu = device != "cpu"
    marks = Marks(gpu)
    with ExitStack() as patches:
        for name, places in SECTIONS.items():
            for kind, method in places:
                patches.enter_context(patch.object(kind, method, _noted(marks, name, getattr(kind, method))))
        if gpu:
            torch.cuda.synchronize()
        marks.mark()
        for _ in range(rounds):
            step()
        if gpu:
            torch.cuda.synchronize()
        marks.mark()
    return marks.shares(rounds)


def around(shares: list[Share]) -> float:
    """What is not the clients' work, as a share of the round: in the GPU's stream where there is one."""
    times = [(one.host if one.gpu is None else one.gpu, one.clients) for one in shares]
    return sum(ms for ms, clients in times if not clients) / sum(ms for ms, _ in times)
