"""How far the curvature of Fisher L-BFGS, as the paper writes it, is from a multiple of the identity, on digits.

    python -m benchmarks.rounds.curvature       # writes digits/curvature.json, a minute on one core

For every pair (s, y) that the server takes: cos(s, y) and |y| / |s|. For every step p = -H g: cos(p, -g) and |p| / |g|;
1 and 1 would be FedAvg.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import fedge
from fedge import tree
from fedge.core import Params

RESULT = Path(__file__).parent / "digits" / "curvature.json"
SETTING: dict[str, Any] = {
    "clients": 100,
    "cohort": 20,
    "rounds": 50,
    "local_lr": 0.2,
    "epochs": 5,
    "batch_size": 10,
    "seed": 0,
}
DAMPINGS = (1.0, 0.3)
Pair = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Watched(fedge.FisherLBFGS):
    """Fisher L-BFGS that writes down its pairs and its steps."""

    taken: list[Pair] = field(default_factory=list)
    steps: list[Pair] = field(default_factory=list)

    def _offer(self, pairs: list[Any], s: Params, bs: Params) -> int:
        refused = super()._offer(pairs, s, bs)
        if not refused:
            self.taken.append(compared(s, pairs[-1][1]))
        return refused

    def _direction(self, pairs: list[Any], g: Params) -> Params:
        p = super()._direction(pairs, g)
        if pairs:
            self.steps.append(compared(tree.scale(-1.0, g), p))
        return p


def compared(a: Params, b: Params) -> Pair:
    """The cosine of the angle between the two, and how many times longer the second is."""
    long_a, long_b = float(tree.norm(a)), float(tree.norm(b))
    return float(tree.dot(a, b)) / (long_a * long_b), long_b / long_a


def watch(clients: str, damping: float, ova: bool = False) -> dict[str, Any]:
    data = fedge.data.load("digits")
    seed, count = SETTING["seed"], SETTING["clients"]
    lists = (
        fedge.partition.iid(data.train_y, count, seed=seed)
        if clients == "IID"
        else fedge.partition.labels_per_client(data.train_y, count, labels=2, seed=seed)
    )
    local = {name: SETTING[name] for name in ("local_lr", "epochs", "batch_size")}
    watched = Watched(fedge.models.mlp(outputs=2 if ova else 10, seed=seed), damping=damping, **local)
    algorithm: Any = fedge.FedOVA(watched) if ova else watched
    rounds = {name: SETTING[name] for name in ("rounds", "cohort", "seed")}
    run = fedge.train(algorithm, fedge.Federation(data, lists), **rounds)
    return {
        "method": "FedOVA + Fisher L-BFGS" if ova else "Fisher L-BFGS",
        "clients": clients,
        "damping": damping,
        "final": run.history[-1]["test_accuracy"],
        "pairs": len(watched.taken),
        "cos_sy": spread([cosine for cosine, _ in watched.taken]),
        "length_sy": spread([length for _, length in watched.taken]),
        "cos_step": spread([cosine for cosine, _ in watched.steps]),
        "length_step": spread([length for _, length in watched.steps]),
    }


def spread(values: list[float]) -> list[float]:
    """Smallest, median, largest."""
    return [round(value, 4) for value in (min(values), median(values), max(values))]


def main() -> None:
    plain = [watch(clients, damping) for clients in ("IID", "two labels") for damping in DAMPINGS]
    ova = [watch("two labels", damping, ova=True) for damping in DAMPINGS]
    RESULT.write_text(json.dumps({"setting": SETTING, "runs": plain + ova}, indent=1) + "\n")
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
