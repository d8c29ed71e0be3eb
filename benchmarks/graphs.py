"""Models that are not chains, and A, on one thread against a plain loop: rows of the table in docs/speed.md.

OMP_NUM_THREADS=1 python -m benchmarks.graphs [WORKLOAD]...    measures on one CPU thread and keeps the figures, in CPU
                                                               time: other work on the machine has less influence on it
python -m benchmarks.speed.table                               writes the table from all stored figures
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import processors
from fedge.bench import WORKLOADS
from fedge.bench.plain import plain_round
from fedge.bench.timing import Round
from fedge.bench.workloads import Workload
from fedge.engine.recording.recorder import WARM

REPEATS = 5
NAMES = ("A", "R", "R2", "L", "L2", "U", "U2", "T", "T2", "TA", "TA2")
FIGURES = Path(__file__).parent / "graphs.json"


def compare(work: Workload) -> dict[str, Any]:
    """CPU seconds per round of both sides, turn by turn, once everything is recorded."""
    begin = time.perf_counter()
    ours, loop = Round(work, "cpu"), plain_round(*work.build(False), torch.arange(work.cohort), torch.device("cpu"))
    found: dict[str, Any] = {"workload": work.name, "seconds": [], "plain": []}
    with ours.working():
        ours()
        found |= {"first": time.perf_counter() - begin, "way": ours.link.way, "peer": "plain loop, CPU time"}
        for step in (ours, loop):
            for _ in range(WARM["cpu"]):
                step()
        for _ in range(REPEATS):
            for side, step in (("seconds", ours), ("plain", loop)):
                begin = time.process_time()
                step()
                found[side].append(time.process_time() - begin)
    return found


def said(one: dict[str, Any]) -> str:
    ours, loop = (1e3 * statistics.median(one[name]) for name in ("seconds", "plain"))
    turns = sorted(b / a for a, b in zip(one["seconds"], one["plain"], strict=True))
    faster = f"{loop / ours:.2f} times faster ({turns[0]:.2f} to {turns[-1]:.2f})"
    return f"{one['workload']}: {ours:.0f} ms per round in the way '{one['way']}', the loop {loop:.0f}: {faster}"


def main(args: list[str]) -> None:
    figures = processors.stored(FIGURES)
    own = processors.own(figures, {})
    own["threads"] = torch.get_num_threads()
    for name in args or NAMES:
        own["timings"][name] = compare(WORKLOADS[name])
        processors.keep(FIGURES, figures)
        print(said(own["timings"][name]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
