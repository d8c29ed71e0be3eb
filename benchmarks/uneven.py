"""Clients of different sizes: seconds to the first round, and of a round, against clients of one size.

    python -m benchmarks.uneven --device cuda --precision tf32 --compile [--one-by-one]

FedAvg on Fashion-MNIST's network and random pictures, one epoch, 20 of 100 clients per round.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

import fedge
from fedge.engine import Simulator, folding
from fedge.engine.clients.run_task import Stacked
from fedge.engine.recording import recorder as trace

CLIENTS, COHORT, EXAMPLES = 100, 20, 6000


def sizes(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Examples a client; in batches of 15 they are 20 steps, 20 or 21, and 7 to 34."""
    return {
        "300": np.full(CLIENTS, 300),
        "296 to 303": rng.integers(296, 304, CLIENTS),
        "100 to 499": rng.integers(100, 500, CLIENTS),
    }


def measure(counts: np.ndarray, rng: np.random.Generator, rounds: int, **options: object) -> tuple[float, float]:
    """Seconds until the first round is done, and of a round after most shapes were seen."""
    drawn = torch.Generator().manual_seed(0)
    x, y = torch.randn(EXAMPLES, 1, 28, 28, generator=drawn), torch.arange(EXAMPLES) % 10
    data = fedge.data.Data(x, y, x[:500], y[:500], 10)
    fed = fedge.Federation(data, [rng.choice(EXAMPLES, count, replace=False) for count in counts])
    algorithm = fedge.FedAvg(fedge.models.fmnist_cnn(seed=0), epochs=1, batch_size=15)
    begin, ends = time.perf_counter(), list[float]()
    fedge.train(
        algorithm,
        fed,
        rounds=rounds,
        cohort=COHORT,
        link=Simulator(algorithm, fed, **options),  # type: ignore[arg-type]
        observe=fedge.Observe(evaluate_every=rounds),
        on_round=lambda _: ends.append(time.perf_counter() - begin),
    )
    return ends[0], float(np.median(np.diff(ends)[-rounds // 2 : -1]))  # the last one is evaluated


class OneByOne(Stacked):
    """A stack that every client leaves as it is done, on a GPU too."""

    def _height(self, active: int, height: int) -> int:
        return active


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--one-by-one", action="store_true", help="every height of the stack, every shape compiled")
    given = vars(parser.parse_args())
    if given.pop("one_by_one"):
        folding.Stacked = OneByOne  # type: ignore[misc]
        trace.SHARE = 0
    rounds, rng = given.pop("rounds"), np.random.default_rng(0)
    if rounds < 6:
        parser.error(f"--rounds {rounds}: at least 6, half of which are timed")
    for name, counts in sizes(rng).items():
        first, each = measure(counts, rng, rounds, **given)
        print(f"{name} examples per client: first round after {first:.2f} s, then {each:.4f} s per round", flush=True)


if __name__ == "__main__":
    main()
