"""One training run with encoded or robustly combined uploads, with and without liars, as one JSON line."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import fedge
from fedge.core import Algorithm
from fedge.engine import Simulator, TooFewReplies
from fedge.engine.clients.directory import Jobs
from fedge.engine.clients.run_task import Upload

RESULTS = Path(__file__).parent / "results"
LIARS, TIMES = 20, -10.0  # of 100 clients, and what they multiply their uploads by


class Liars(Simulator):
    """Every fifth client sends ten times the opposite of what it computed."""

    def received(self, jobs: Jobs, uploads: dict[str, Upload]) -> dict[str, Upload]:
        lies = jobs.clients % (100 // LIARS) == 0
        factor = torch.where(lies, TIMES, 1.0).to(self.device)
        return {
            name: ({part: _scaled(leaves, factor) for part, leaves in up.items()}, w)
            for name, (up, w) in uploads.items()
        }


def _scaled(leaves: dict[str, torch.Tensor], factor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: leaf * factor.view(-1, *[1] * (leaf.dim() - 1)).to(leaf.dtype) for name, leaf in leaves.items()}


@dataclass(frozen=True)
class Problem:
    data: str
    model: str
    rounds: int
    epochs: int
    batch_size: int
    lr: float
    seeds: tuple[int, ...]


PROBLEMS = {
    "digits": Problem("digits", "mlp", 100, 5, 10, 0.2, (0, 1, 2)),
    "fmnist": Problem("fashion_mnist", "fmnist_cnn", 40, 1, 15, 0.1, (0,)),
}
Around = Callable[[Algorithm[Any]], Algorithm[Any]]
CODECS: dict[str, Around] = {
    "as it is": lambda inner: inner,
    "Cast bf16": lambda inner: fedge.Compressed(inner, fedge.Cast()),
    "Quantise 8": lambda inner: fedge.Compressed(inner, fedge.Quantise(8)),
    "Quantise 4": lambda inner: fedge.Compressed(inner, fedge.Quantise(4)),
    "Quantise 2": lambda inner: fedge.Compressed(inner, fedge.Quantise(2)),
    "TopK 1 %": lambda inner: fedge.Compressed(inner, fedge.TopK(0.01)),
    "TopK 1 %, no feedback": lambda inner: fedge.Compressed(inner, fedge.TopK(0.01), feedback=False),
}
RULES: dict[str, Around] = {
    "Mean": lambda inner: inner,
    "ClippedMean": lambda inner: fedge.Robust(inner, fedge.ClippedMean(1.0)),
    "TrimmedMean 30 %": lambda inner: fedge.Robust(inner, fedge.TrimmedMean(0.3)),
    "Median": lambda inner: fedge.Robust(inner, fedge.Median()),
    "Krum, bad 6, keep 8": lambda inner: fedge.Robust(inner, fedge.Krum(6, 8)),
}


@dataclass(frozen=True)
class Entry:
    """What identifies a run."""

    problem: str
    kind: str  # codec, rule or lies: a rule with liars
    name: str
    seed: int


def entries(problem: str, kinds: tuple[str, ...] = ("codec", "rule", "lies")) -> list[Entry]:
    names = {"codec": CODECS, "rule": RULES, "lies": RULES}
    return [Entry(problem, k, name, seed) for seed in PROBLEMS[problem].seeds for k in kinds for name in names[k]]


def run(entry: Entry, device: str) -> dict[str, Any]:
    problem = PROBLEMS[entry.problem]
    data = fedge.data.load(problem.data)
    federation = fedge.Federation(data, fedge.partition.iid(data.train_y, 100, seed=entry.seed))
    model = getattr(fedge.models, problem.model)(seed=entry.seed)
    inner = fedge.FedAvg(model, lr=problem.lr, epochs=problem.epochs, batch_size=problem.batch_size)
    algorithm = (CODECS if entry.kind == "codec" else RULES)[entry.name](inner)
    link = (Liars if entry.kind == "lies" else Simulator)(algorithm, federation, device=device)
    records: list[dict[str, Any]] = []
    options: dict[str, Any] = {"rounds": problem.rounds, "cohort": 20, "seed": entry.seed, "on_round": records.append}
    with suppress(TooFewReplies):  # the model is not finite any more
        fedge.train(algorithm, federation, link=link, **options)
    curve = [record["test_accuracy"] for record in records]
    last = max(1, problem.rounds // 10)
    whole = len(curve) == problem.rounds
    return {
        **asdict(entry),
        "rounds": len(curve),
        "final": sum(curve[-last:]) / last if whole else None,
        "best": max(curve),
        "up_bytes": sum(record["up_bytes"] for record in records),
        "client_memory_bytes": link.memory_bytes(),
        "dropped": sum(len(record["dropped"]) for record in records),
        "device": str(link.device),
    }


def lines(path: Path = RESULTS / "results.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
