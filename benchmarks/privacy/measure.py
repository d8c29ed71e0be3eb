"""One private training run, as one JSON line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fedge
from fedge.core import Algorithm

RESULTS = Path(__file__).parent / "results"
LABELS = 2  # per client, for FedOVA


@dataclass(frozen=True)
class Problem:
    data: str
    model: str
    clients: int
    expected: int
    rounds: int
    epochs: int
    lr: float
    clip: float
    noises: tuple[float, ...]
    seeds: tuple[int, ...]
    methods: tuple[str, ...] = ("FedAvg", "FedOVA")


PROBLEMS = {
    "digits": Problem("digits", "mlp", 400, 100, 50, 5, 0.2, 1.0, (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0), (0, 1, 2)),
    "fmnist": Problem(
        "fashion_mnist", "fmnist_cnn", 1000, 100, 100, 1, 0.1, 0.5, (0.0, 0.5, 1.0, 2.0), (0,), ("FedAvg",)
    ),
}


@dataclass(frozen=True)
class Entry:
    """What identifies a run; `noise` 0 shortens uploads and adds nothing, None is the algorithm as it is."""

    problem: str
    method: str
    noise: float | None
    seed: int


def entries(problem: str) -> list[Entry]:
    chosen = PROBLEMS[problem]
    noises = (None, *chosen.noises)
    return [Entry(problem, method, z, seed) for seed in chosen.seeds for method in chosen.methods for z in noises]


def run(entry: Entry, device: str) -> dict[str, Any]:
    problem = PROBLEMS[entry.problem]
    data = fedge.data.load(problem.data)
    split = fedge.partition.iid if entry.method == "FedAvg" else fedge.partition.labels_per_client
    options = {} if entry.method == "FedAvg" else {"labels": LABELS}
    federation = fedge.Federation(data, split(data.train_y, clients=problem.clients, seed=entry.seed, **options))
    records: list[dict[str, Any]] = []
    fedge.train(
        _algorithm(problem, entry, data.classes),
        federation,
        rounds=problem.rounds,
        cohort=problem.expected,
        sampling="poisson",
        seed=entry.seed,
        device=device,
        on_round=records.append,
    )
    last = max(1, problem.rounds // 10)
    curve = [record["test_accuracy"] for record in records]
    spent = {name: records[-1].get(name) for name in ("epsilon", "delta")}
    return {**asdict(entry), "final": sum(curve[-last:]) / last, "best": max(curve), **spent, "rounds": len(curve)}


def _algorithm(problem: Problem, entry: Entry, classes: int) -> Algorithm[Any]:
    ova = entry.method == "FedOVA"
    model = getattr(fedge.models, problem.model)(outputs=2 if ova else classes, seed=entry.seed)
    inner: Algorithm[Any] = fedge.FedAvg(model, lr=problem.lr, epochs=problem.epochs, batch_size=10)
    if ova:
        inner = fedge.FedOVA(inner, classes=classes)
    if entry.noise is None:
        return inner
    held = LABELS / classes if ova else 1.0
    who = {"clients": problem.clients, "expected": problem.expected}
    return fedge.Private(inner, clip=problem.clip, noise=entry.noise, held=held, **who)


def lines(path: Path = RESULTS / "results.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
