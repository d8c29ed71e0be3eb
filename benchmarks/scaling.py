"""Does per round's time follow the work? Cohorts of 10, 500 and 1000, populations of 1e4 and 1e6, and the start.

    python -m benchmarks.scaling

The workload is C's (digits, MLP 64-32-10, 14 examples per client, one epoch), on one CPU thread.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

import fedge
from fedge.core import drive
from fedge.engine import Simulator
from fedge.handle import parameters
from fedge.loop import cohorts

START = """
import time; begin = time.perf_counter()
from fedge.bench import WORKLOADS
from fedge.bench.timing import Round
from fedge.engine.recording.recorder import Traced
count, seen = Traced._count, []
def stepping(*args):
    seen.append(time.perf_counter())
    count(*args)
Traced._count = stepping
Round(WORKLOADS["B"], "cpu")()
print(seen[1] - begin, time.perf_counter() - begin)
"""  # the second step begins when the first is done


def rounds(clients: int, cohort: int) -> Callable[[], float]:
    """A function that does the next round of so many and says how long it took."""
    data = fedge.data.load("digits")
    size = len(data.train_y)
    index = (np.random.default_rng(0).integers(0, size, (clients, 1)) + np.arange(14)) % size
    federation = fedge.Federation(data, list(index))
    algorithm = fedge.FedAvg(fedge.models.mlp(seed=0), epochs=1, batch_size=10)
    link, draw = Simulator(algorithm, federation), cohorts(clients, cohort)
    state, number = algorithm.init(parameters(algorithm.model)), 0

    def one() -> float:
        nonlocal state, number
        number += 1
        begin = time.perf_counter()
        with link.working():
            state, _ = drive(algorithm.round(state), link, 0, number, draw)
        return time.perf_counter() - begin

    for _ in range(10):
        one()
    return one


def in_turns(kinds: dict[int, Callable[[], float]], repeats: int = 25) -> dict[int, float]:
    """The median time of each; they take turns, so that a busy moment of the machine hits all of them."""
    found: dict[int, list[float]] = {size: [] for size in kinds}
    for _ in range(repeats):
        for size, one in kinds.items():
            found[size].append(one())
    return {size: statistics.median(times) for size, times in found.items()}


def main() -> None:
    torch.set_num_threads(1)
    command = [sys.executable, "-c", START]
    lines = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(4)]
    first, whole = (
        statistics.median(column) for column in zip(*(map(float, line.split()) for line in lines[1:]), strict=True)
    )
    cohort = in_turns({size: rounds(2000, size) for size in (10, 500, 1000)})
    people = in_turns({size: rounds(size, 100) for size in (10_000, 1_000_000)})
    figures = [
        ("import to the end of the first step of B, s", first, 3.0),
        ("t(cohort 1000) / (100 t(cohort 10))", cohort[1000] / (100 * cohort[10]), 1.2),
        ("t(cohort 1000) / t(cohort 500)", cohort[1000] / cohort[500], 2.4),
        ("t(population 1e6) / t(population 1e4), cohort 100", people[1_000_000] / people[10_000], 1.5),
    ]
    for name, value, limit in figures:
        print(f"{'ok ' if value <= limit else 'NO '} {value:8.3f}  (at most {limit:g})  {name}")
    print(f"import to the end of the first round, its steps recorded: {whole:.2f} s")
    print("ms per round:", {size: round(1e3 * value, 2) for size, value in (cohort | people).items()})
    sys.exit(any(value > limit for _, value, limit in figures))


if __name__ == "__main__":
    main()
