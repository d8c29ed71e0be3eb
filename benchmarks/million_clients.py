"""A million clients of 4 examples, one of them with 100,000; linear model, 100 clients per round.

    python -m benchmarks.million_clients

Prints the seconds of set-up, of a round, of a round with the large client in the cohort, and the peak memory.
"""

from __future__ import annotations

import resource
import statistics
import time

import numpy as np
import torch

import fedge
from fedge.core import At, drive
from fedge.engine import Simulator
from fedge.loop import cohorts

CLIENTS, LARGE, COHORT = 1_000_000, 100_000, 100


def federation() -> fedge.Federation:
    rng = np.random.default_rng(0)
    examples = 4 * CLIENTS + LARGE
    x = torch.from_numpy(rng.standard_normal((examples, 10), dtype=np.float32))
    y = torch.from_numpy(rng.integers(0, 2, examples))
    data = fedge.data.Data(x, y, x[:1000], y[:1000], 2)
    lists = list(np.arange(4 * CLIENTS).reshape(CLIENTS, 4))
    lists[17] = np.concatenate([lists[17], np.arange(4 * CLIENTS, examples)])
    return fedge.Federation(data, lists)


def main() -> None:
    torch.set_num_threads(1)
    begin = time.perf_counter()
    fed = federation()
    algorithm = fedge.FedAvg(fedge.models.logistic(10, 2, seed=0), epochs=1, batch_size=10)
    link = Simulator(algorithm, fed)
    print(f"set-up {time.perf_counter() - begin:.1f} s for {fed.clients:,} clients, {len(fed.index):,} examples")
    draw = cohorts(fed.clients, COHORT)
    state = algorithm.init({name: leaf.detach() for name, leaf in algorithm.model.named_parameters()})
    seconds = []
    for number in range(1, 12):
        begin = time.perf_counter()
        state, _ = drive(algorithm.round(state), link, 0, number, draw)
        seconds.append(time.perf_counter() - begin)
    print(f"a round {statistics.median(seconds):.4f} s (first {seconds[0]:.2f} s, median of {len(seconds)})")
    begin = time.perf_counter()

    def with_large(at: At) -> torch.Tensor:
        return torch.cat([torch.tensor([17]), draw(at)])

    drive(algorithm.round(state), link, 0, 99, with_large)
    print(f"a round with the large client, {-(-LARGE // 10):,} steps long: {time.perf_counter() - begin:.2f} s")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
