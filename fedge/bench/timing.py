"""Timing: the two sides take turns, and the medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fedge.bench.plain import plain_round
from fedge.bench.workloads import Workload
from fedge.core import drive
from fedge.engine import Simulator
from fedge.handle import parameters
from fedge.train import cohorts


@dataclass(frozen=True)
class Timing:
    """Seconds a round: ours and the plain loop's, every repeat; and the time to the end of the first round."""

    workload: str
    device: str
    seconds: list[float]
    plain: list[float]
    first: float
    threads: int
    plain_threads: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float | None:
        """How many times faster than the plain loop."""
        return statistics.median(self.plain) / self.median if self.plain else None


def measure(
    workload: Workload, device: str, repeats: int = 5, plain: bool = True, threads: tuple[int, int] | None = None,
    **engine: Any,
) -> Timing:  # fmt: skip
    """Rounds of ours and of the loop in turns; `threads` = (ours, the loop's), by default all for both."""
    ours_threads, plain_threads = threads or (torch.get_num_threads(), torch.get_num_threads())
    torch.set_num_threads(ours_threads)
    begin = time.perf_counter()
    step = round_of(workload, device, **engine)
    step()
    first = time.perf_counter() - begin
    for _ in range(3):
        step()
    loop = _loop(workload, device) if plain else None
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(repeats):
        if loop is not None:
            torch.set_num_threads(plain_threads)
            theirs.append(timed(loop, device))
        torch.set_num_threads(ours_threads)
        ours.append(timed(step, device))
    return Timing(workload.name, device, ours, theirs, first, ours_threads, plain_threads)


def round_of(workload: Workload, device: str, kind: type[Simulator] = Simulator, **engine: Any) -> Callable[[], Any]:
    """A function that does the next round of the workload."""
    algorithm, federation = workload.build(device != "cpu")
    link = kind(algorithm, federation, device=device, **engine)
    draw = cohorts(federation.clients, workload.cohort)
    params = {name: leaf.to(link.device) for name, leaf in parameters(algorithm.model).items()}
    state, number = algorithm.init(params), 0

    def step() -> Any:
        nonlocal state, number
        number += 1
        with link.working():
            state, _ = drive(algorithm.round(state), link, 0, number, draw)
        return state

    return step


def _loop(workload: Workload, device: str) -> Callable[[], Any] | None:
    algorithm, federation = workload.build(device != "cpu")
    clients = torch.arange(workload.cohort)
    loop: Callable[[], Any] | None = plain_round(algorithm, federation, clients, torch.device(device))
    return loop


def timed(step: Callable[[], Any], device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - begin
