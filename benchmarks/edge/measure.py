"""One training run on one fleet, as one JSON line: what it took in seconds and joules to reach an accuracy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import fedge
from fedge.core import Algorithm
from fedge.edge import Clock, Profiles

RESULTS = Path(__file__).parent / "results"
CLIENTS, COHORT, LABELS = 100, 20, 2

# Devices of a fleet differ by these factors (the middle 90 % of them); the ten-fold ones are for asynchronous methods.
FLEETS = {
    "Wi-Fi": Profiles("raspberry_pi", "wifi", spread=3.0),
    "LTE": Profiles("phone", "lte", spread=3.0),
    "LoRa": Profiles("microcontroller", "lora", spread=3.0),
    "LTE, ten-fold": Profiles("phone", "lte", spread=10.0),
    "LoRa, ten-fold": Profiles("microcontroller", "lora", spread=10.0),
}
EVEN, TENFOLD = list(FLEETS)[:3], list(FLEETS)[3:]


@dataclass(frozen=True)
class Problem:
    """Settings were tuned on held-out data elsewhere (benchmarks/rounds, benchmarks/algorithms) and not for this."""

    data: str
    model: str
    rounds: int
    batch_size: int
    target: float
    fedavg: dict[str, Any]
    fedova: dict[str, Any]
    spectral: dict[str, Any]
    lbfgs: dict[str, Any]
    seeds: tuple[int, ...] = (0, 1, 2)
    epochs: int = 5
    buffer: int = 4  # of a class; a cohort of 20 with 2 of 10 labels answers 4 times per class


SPECTRAL = {"server_optimiser": "spectral", "server_momentum": 0.5, "server_lr": 4.0}
LARGE = {"fedavg": {"lr": 0.1}, "fedova": {"lr": 0.14}, "spectral": {"lr": 0.07, **SPECTRAL}, "lbfgs": {}}
PROBLEMS = {
    "digits": Problem(
        "digits",
        "mlp",
        50,
        10,
        0.85,
        {"lr": 0.5},
        {"lr": 0.2},
        {"lr": 0.2, **SPECTRAL},
        {"local_lr": 0.5, "damping": 0.3},
    ),
    "fmnist": Problem("fashion_mnist", "fmnist_cnn", 120, 15, 0.85, **LARGE),
    "kws": Problem("speech_commands", "kws_cnn", 120, 15, 0.85, **LARGE),
}
Build = Callable[[Problem, Callable[[int], torch.nn.Module]], Algorithm[Any]]


def _local(problem: Problem) -> dict[str, Any]:
    return {"epochs": problem.epochs, "batch_size": problem.batch_size}


def fedova(problem: Problem, model: Callable[[int], torch.nn.Module], setting: dict[str, Any]) -> fedge.FedOVA:
    return fedge.FedOVA(fedge.FedAvg(model(2), **_local(problem), **setting))


METHODS: dict[str, Build] = {
    "FedAvg": lambda p, model: fedge.FedAvg(model(10), **_local(p), **p.fedavg),
    "Fisher L-BFGS": lambda p, model: fedge.FisherLBFGS(model(10), **_local(p), **p.lbfgs),
    "FedOVA": lambda p, model: fedova(p, model, p.fedova),
    "FedOVA + spectral": lambda p, model: fedova(p, model, p.spectral),
    "FedBuff": lambda p, model: fedge.FedBuff(fedge.FedAvg(model(10), **_local(p), **p.fedavg), buffer=10),
    "asynchronous FedOVA": lambda p, model: fedge.FedBuff(fedova(p, model, p.fedova), buffer=p.buffer),
    "asynchronous FedOVA, half the buffer": lambda p, model: fedge.FedBuff(
        fedova(p, model, p.fedova), buffer=p.buffer // 2
    ),
    "asynchronous FedOVA, one by one": lambda p, model: fedge.FedAsync(fedova(p, model, p.fedova)),
}
EVERYWHERE = ("FedAvg", "Fisher L-BFGS", "FedOVA", "FedOVA + spectral", "FedBuff", "asynchronous FedOVA")
OVA = ("FedOVA", "asynchronous FedOVA", "asynchronous FedOVA, half the buffer", "asynchronous FedOVA, one by one")
UNEVEN = ("FedAvg", "FedBuff", *OVA)


@dataclass(frozen=True)
class Entry:
    """What identifies a run."""

    problem: str
    fleet: str
    method: str
    seed: int


def entries(problem: str) -> list[Entry]:
    pairs = [(fleet, method) for fleet in EVEN for method in EVERYWHERE]
    pairs += [(fleet, method) for fleet in TENFOLD for method in UNEVEN]
    return [Entry(problem, *pair, seed) for seed in PROBLEMS[problem].seeds for pair in pairs]


def run(entry: Entry, device: str) -> dict[str, Any]:
    problem = PROBLEMS[entry.problem]
    data = fedge.data.load(problem.data)
    lists = fedge.partition.labels_per_client(data.train_y, clients=CLIENTS, labels=LABELS, seed=entry.seed)
    federation = fedge.Federation(data, lists)

    def model(outputs: int) -> torch.nn.Module:
        found: torch.nn.Module = getattr(fedge.models, problem.model)(outputs=outputs, seed=entry.seed)
        return found

    algorithm = METHODS[entry.method](problem, model)
    link = Clock(fedge.Engine(device).link(algorithm, federation), federation, FLEETS[entry.fleet])
    found = fedge.train(algorithm, federation, rounds=problem.rounds, cohort=COHORT, seed=entry.seed, link=link)
    return {**asdict(entry), **told(found.history, problem.target), "device": device, "torch": torch.__version__}


def told(history: list[dict[str, Any]], target: float) -> dict[str, Any]:
    """The result in a few numbers; what it took is counted to the end of the round that reaches the target."""
    last = max(1, len(history) // 10)
    line: dict[str, Any] = {"rounds": len(history), "final": _mean([r["test_accuracy"] for r in history[-last:]])}
    reached = next((at for at, r in enumerate(history, 1) if r["test_accuracy"] >= target), None)
    for name in ("virtual_seconds", "joules"):
        line[name] = sum(record[name] for record in history)
        line[f"{name}_to"] = None if reached is None else sum(record[name] for record in history[:reached])
    line["megabytes_to"] = None
    if reached is not None:
        line["megabytes_to"] = sum(r["up_bytes"] + r["down_bytes"] for r in history[:reached]) / 1e6
    return line | {"rounds_to": reached}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def lines(path: Path | None = None) -> list[dict[str, Any]]:
    path = RESULTS / "results.jsonl" if path is None else path
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
