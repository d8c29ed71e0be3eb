"""Two processes of one thread against one: a round of a workload through `Ranks`, in turns with the simulator alone.

    python -m benchmarks.ranks [WORKLOAD [REPEATS]]

Both sides run in the same processes, so they share whatever else the machine does: while rank 0 computes a round by
itself, the other rank sleeps. A repeat is alone, together, alone; its ratio is that of the mean of the two rounds alone
to the round together. Both sides are restricted to one thread a process. On a machine that others use too, the ratio
of processor time (one process, to the rank that needed most) says what two free cores would give.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from fedge.bench import WORKLOADS
from fedge.bench.timing import Round
from fedge.engine import Group, Ranks, joined

PROCESSES = 2


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"median {middle:.3f}, quartiles {low:.3f} to {high:.3f}"


def timed(group: Group, step: Callable[[], Any]) -> tuple[float, float]:
    """Seconds from a common start to the end on rank 0, and the most processor time that a rank needed."""
    group.first(lambda: None)
    begin, worked = time.perf_counter(), time.process_time()
    step()
    seconds, worked = time.perf_counter() - begin, time.process_time() - worked
    return seconds, max(group.gather(worked))


def measure(group: Group, name: str, repeats: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    alone = Round(WORKLOADS[name], "cpu") if group.leads else lambda: None
    together = Round(WORKLOADS[name], "cpu", Ranks, group=group)
    for _ in range(2):  # record the steps
        timed(group, alone)
        timed(group, together)
    one, two = [timed(group, alone)], []
    for _ in range(repeats):
        two.append(timed(group, together))
        one.append(timed(group, alone))
    return one, two


def main() -> None:
    name, repeats = sys.argv[1] if len(sys.argv) > 1 else "A", int(sys.argv[2]) if len(sys.argv) > 2 else 9
    if repeats < 2:
        sys.exit(f"REPEATS is {repeats}: quartiles need 2 at least")
    if "RANK" not in os.environ:
        launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
        words = [sys.executable, "-m", *launch, "-m", "benchmarks.ranks", name, str(repeats)]
        sys.exit(subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode)
    with joined() as group:
        torch.set_num_threads(1)
        one, two = measure(group, name, repeats)
        if not group.leads:
            return
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {cores} cores")
        print(f"{name} ({WORKLOADS[name].title}), one thread a process, {repeats} repeats in turns")
        for at, kind in enumerate(("seconds", "processor seconds")):
            single, pair = [times[at] for times in one], [times[at] for times in two]
            ratios = [(a + b) / 2 / t for a, b, t in zip(single, single[1:], pair, strict=False)]
            print(f"{kind} a round\n   one process: {quartiles(single)}\n   {group.size} processes: {quartiles(pair)}")
            print(f"   times faster: {quartiles(ratios)}")


if __name__ == "__main__":
    main()
