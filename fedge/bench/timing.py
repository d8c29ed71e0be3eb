"""Timing: the two sides take turns, and the medians are compared."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from fedge.bench.flops import flops
from fedge.bench.plain import plain_round
from fedge.bench.split import Share, split
from fedge.bench.workloads import Workload
from fedge.core import drive
from fedge.engine import Simulator
from fedge.engine.hardware.budget import peak
from fedge.engine.recording.recorder import WARM
from fedge.handle import parameters
from fedge.loop import cohorts

SPAN = 0.1  # seconds: rounds that are shorter are timed several in a row, or a clock tick and a cold cache would count


@dataclass(frozen=True)
class Timing:
    """Seconds per round: ours and the plain loop's, every repeat; and the time to the end of the first round.

    `flops` is the arithmetic of a round, forwards and backwards, None where it is not counted. `outside` is the share
    of a round in which no kernel runs, on any core, as torch's profiler sees it. `around` is what cohort, checks,
    aggregation, ledger and the server add to the clients' work, as a share of it; None where clients run side by side.
    """

    workload: str
    device: str
    seconds: list[float]
    plain: list[float]
    first: float
    threads: int
    plain_threads: int
    flops: int | None = None
    outside: float | None = None
    peak_memory: int = 0
    around: float | None = None
    way: str | None = None  # in which clients were computed
    split: list[Share] = field(default_factory=list)  # where a round's time goes, if that was asked for
    peer: str = "plain loop"  # whom `plain` is the time of

    @property
    def flops_a_second(self) -> float | None:
        return None if self.flops is None else self.flops / self.median

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float | None:
        """How many times faster than the plain loop."""
        return statistics.median(self.plain) / self.median if self.plain else None


def measure(
    workload: Workload, device: str, repeats: int = 5, plain: bool = True, threads: tuple[int, int] | None = None,
    details: bool = True, profile: bool = False, **engine: Any,
) -> Timing:  # fmt: skip
    """Rounds of ours and of the loop in turns; `threads` = (ours, the loop's), by default what suits each.

    `details`: the shares outside kernels and around the work, and the arithmetic; `profile`: the sections of a round.
    """
    every = torch.get_num_threads()
    ours_threads, plain_threads = threads or (every, min(every, workload.loop_threads or every))
    torch.set_num_threads(ours_threads)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    step = Round(workload, device, **engine)
    step()
    first = time.perf_counter() - begin
    for _ in range(WARM["cpu" if device == "cpu" else "cuda"]):
        last = timed(step, device)
        if time.perf_counter() - begin > 20:
            break
    rounds = max(1, round(SPAN / last))
    loop = _loop(workload, device) if plain else None
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(repeats):
        if loop is not None:
            torch.set_num_threads(plain_threads)
            theirs.append(timed(loop, device))
        torch.set_num_threads(ours_threads)
        ours.append(timed(step, device, rounds))
    shares = _split(step, device, rounds) if profile else []
    outside, around = (_outside(step, device), _around(step, device, rounds)) if details else (None, None)
    arithmetic = flops(*workload.build(device != "cpu"), workload.cohort) if details else None
    about = (arithmetic, outside, peak(torch.device(device)), around, step.link.way, shares)
    return Timing(workload.name, device, ours, theirs, first, ours_threads, plain_threads, *about)


def _split(step: Round, device: str, rounds: int) -> list[Share]:
    with step.working():
        return split(step, device, rounds)


def _outside(step: Callable[[], Any], device: str) -> float:
    """1 - (time in kernels) / (time of a round, times the cores at work)."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it prints otherwise
    gpu = device != "cpu"
    activities = [ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]
    every = _ExperimentalConfig(profile_all_threads=True)  # else it sees nothing of workers that are there already
    with warnings.catch_warnings(), profile(activities=activities, experimental_config=every) as found:
        warnings.simplefilter("ignore")
        seconds = timed(step, device)
    events = found.key_averages()
    busy = sum(one.self_device_time_total if gpu else one.self_cpu_time_total for one in events) * 1e-6
    threads = {one.thread for one in found.events() or [] if one.self_cpu_time_total > 0}
    cores = 1 if gpu else min(max(1, len(threads)), torch.get_num_threads())
    return max(0.0, 1.0 - float(busy) / (seconds * cores))


def _around(step: Round, device: str, rounds: int) -> float | None:
    """(time of a round) / (time of the clients' work in it) - 1; a GPU finishes that work before the clock stops."""
    if step.link.pool.workers > 1:
        return None
    work, fold = 0.0, step.link._fold

    def noted(*args: Any, **kwargs: Any) -> Any:
        nonlocal work
        found: Any = None

        def once() -> None:
            nonlocal found
            found = fold(*args, **kwargs)

        work += timed(once, device)
        return found

    step.link._fold = noted  # type: ignore[method-assign]
    try:
        whole = timed(step, device, rounds) * rounds
    finally:
        del step.link._fold
    return whole / work - 1


class Round:
    """Does the next round of a workload whenever it is called."""

    def __init__(self, workload: Workload, device: str, kind: type[Simulator] = Simulator, **engine: Any) -> None:
        self.algorithm, federation = workload.build(device != "cpu")
        self.link = kind(self.algorithm, federation, device=device, **engine)
        self.draw = cohorts(federation.clients, workload.cohort)
        params = {name: leaf.to(self.link.runtime.device) for name, leaf in parameters(self.algorithm.model).items()}
        self.state, self.number, self.at_work = self.algorithm.init(params), 0, False

    def __call__(self) -> Any:
        """As a run does it: within `working`, which a run enters once for all its rounds."""
        self.number += 1
        with nullcontext() if self.at_work else self.link.working():
            self.state, _ = drive(self.algorithm.round(self.state), self.link, 0, self.number, self.draw)
        return self.state

    @contextmanager
    def working(self) -> Iterator[None]:
        """Several rounds in a row."""
        with self.link.working():
            self.at_work = True
            try:
                yield
            finally:
                self.at_work = False


def _loop(workload: Workload, device: str) -> Callable[[], Any] | None:
    algorithm, federation = workload.build(device != "cpu")
    clients = torch.arange(workload.cohort)
    loop: Callable[[], Any] | None = plain_round(algorithm, federation, clients, torch.device(device))
    return loop


def timed(step: Callable[[], Any], device: str, times: int = 1) -> float:
    """Seconds for one call, on average over so many in a row."""
    if device != "cpu":
        torch.cuda.synchronize()
    with step.working() if isinstance(step, Round) else nullcontext():
        begin = time.perf_counter()
        for _ in range(times):
            step()
        if device != "cpu":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / times
