"""One training run, as one JSON line per fleet: what it took in seconds and joules to reach an accuracy.

A server that waits for all trains the same model on every fleet, so one run of it is timed by a clock per fleet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

import fedge
from fedge.algorithms.asynchronous import Late
from fedge.core import Algorithm
from fedge.edge import Clock, Profiles
from fedge.edge.clock import Spent
from fedge.edge.devices import Fleet
from fedge.engine import BaseLink

RESULTS = Path(__file__).parent / "results"
CLIENTS, COHORT, LABELS = 100, 20, 2

# Devices of a fleet differ by these factors (the middle 90 % of them); the ten-fold ones are for asynchronous methods.
FLEETS: dict[str, Fleet] = {
    "Wi-Fi": Profiles("raspberry_pi", "wifi", spread=3.0),
    "LTE": Profiles("phone", "lte", spread=3.0),
    "LoRa": Profiles("microcontroller", "lora", spread=3.0),
    "LTE, ten-fold": Profiles("phone", "lte", spread=10.0),
    "LoRa, ten-fold": Profiles("microcontroller", "lora", spread=10.0),
}
EVEN, TENFOLD = list(FLEETS)[:3], list(FLEETS)[3:]


@dataclass(frozen=True)
class Problem:
    """Settings were tuned on held-out data elsewhere (benchmarks/rounds, benchmarks/algorithms) and not for this.

    `spectral` is FedAvg's setting with a spectral step of the server, `spectral_fedova` that of FedOVA.
    """

    data: str
    model: str
    rounds: int
    batch_size: int
    target: float
    fedavg: dict[str, Any]
    fedova: dict[str, Any]
    spectral: dict[str, Any]
    spectral_fedova: dict[str, Any]
    lbfgs: dict[str, Any]
    seeds: tuple[int, ...] = (0, 1, 2)
    epochs: int = 5
    buffer: int = 4  # a cohort of 20 with 2 of 10 labels answers 4 times per class and round


SPECTRAL = {"server_optimiser": "spectral", "server_momentum": 0.5, "server_lr": 4.0}
LARGE: dict[str, dict[str, Any]] = {  # those of the yardstick's runs: `timed` refuses any other
    "fedova": {"lr": 0.14},
    "spectral": {"lr": 0.07, **SPECTRAL, "server_momentum": 0.3, "server_lr": 6.0},
    "spectral_fedova": {"lr": 0.07, **SPECTRAL},
    "lbfgs": {},
}
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
        {"lr": 0.2, **SPECTRAL},
        {"local_lr": 0.5, "damping": 0.3},
    ),
    "fmnist": Problem("fashion_mnist", "fmnist_cnn", 120, 15, 0.85, {"lr": 0.14}, **LARGE),
    "kws": Problem("speech_commands", "kws_cnn", 120, 15, 0.85, {"lr": 0.07}, **LARGE),
}
Build = Callable[[Problem, Callable[[int], torch.nn.Module]], Algorithm[Any]]


def _local(problem: Problem) -> dict[str, Any]:
    return {"epochs": problem.epochs, "batch_size": problem.batch_size}


def fedova(problem: Problem, model: Callable[[int], torch.nn.Module], setting: dict[str, Any]) -> fedge.FedOVA:
    return fedge.FedOVA(fedge.FedAvg(model(2), **_local(problem), **setting))


def one_by_one(problem: Problem, model: Callable[[int], torch.nn.Module], setting: dict[str, Any]) -> fedge.FedBuff:
    """Every upload moves its class at once, with the weight that it has in a round of FedOVA."""
    return fedge.FedBuff(fedova(problem, model, {**setting, "server_lr": 1 / problem.buffer}), buffer=1, staleness=0.0)


STEPS = ("lr", "local_lr", "epochs", "batch_size")  # fields that are told even if they are the defaults
WINDOW = 10  # rounds of the late mean

METHODS: dict[str, Build] = {
    "FedAvg": lambda p, model: fedge.FedAvg(model(10), **_local(p), **p.fedavg),
    "FedAvg + spectral": lambda p, model: fedge.FedAvg(model(10), **_local(p), **p.spectral),
    "Fisher L-BFGS": lambda p, model: fedge.FisherLBFGS(model(10), **_local(p), **p.lbfgs),
    "FedOVA": lambda p, model: fedova(p, model, p.fedova),
    "FedOVA + spectral": lambda p, model: fedova(p, model, p.spectral_fedova),
    "FedBuff": lambda p, model: fedge.FedBuff(fedge.FedAvg(model(10), **_local(p), **p.fedavg), buffer=10),
    "asynchronous FedOVA": lambda p, model: one_by_one(p, model, p.fedova),
    "asynchronous FedOVA, buffers of 4": lambda p, model: fedge.FedBuff(fedova(p, model, p.fedova), buffer=p.buffer),
    "asynchronous FedOVA, FedAsync": lambda p, model: fedge.FedAsync(fedova(p, model, p.fedova)),
    "FedOVA, late mean": lambda p, model: fedge.Averaged(fedova(p, model, p.fedova), WINDOW),
    "asynchronous FedOVA, late mean": lambda p, model: fedge.Averaged(one_by_one(p, model, p.fedova), WINDOW),
    "asynchronous FedOVA, buffers of 4, late mean": lambda p, model: fedge.Averaged(
        fedge.FedBuff(fedova(p, model, p.fedova), buffer=p.buffer), WINDOW
    ),
    "asynchronous FedOVA + spectral": lambda p, model: fedge.FedBuff(
        fedova(p, model, p.spectral_fedova), buffer=p.buffer
    ),
}
EVERYWHERE = (
    "FedAvg", "FedAvg + spectral", "Fisher L-BFGS", "FedOVA", "FedOVA + spectral", "FedBuff", "asynchronous FedOVA"
)  # fmt: skip
OVA = ("FedOVA", "asynchronous FedOVA", "asynchronous FedOVA, buffers of 4", "asynchronous FedOVA, FedAsync")
SPECTRAL_OVA = ("FedOVA + spectral", "asynchronous FedOVA + spectral")
LATE = ("FedOVA, late mean", "asynchronous FedOVA, late mean", "asynchronous FedOVA, buffers of 4, late mean")
UNEVEN = ("FedAvg", "FedAvg + spectral", "FedBuff", *OVA, *LATE, *SPECTRAL_OVA)
WAITS = ("FedAvg", "FedAvg + spectral", "Fisher L-BFGS", "FedOVA", "FedOVA, late mean", "FedOVA + spectral")
FIRST = ("FedOVA", "asynchronous FedOVA", *LATE, *SPECTRAL_OVA)  # on LTE phones with a ten-fold spread


@dataclass(frozen=True)
class Entry:
    """What identifies a run."""

    problem: str
    fleet: str
    method: str
    seed: int


def entry_of(line: dict[str, Any]) -> Entry:
    return Entry(**{one.name: line[one.name] for one in fields(Entry)})


def entries(problem: str) -> list[Entry]:
    """All lines that the tables of a problem are made of."""
    pairs = [(fleet, method) for fleet in EVEN for method in EVERYWHERE]
    pairs += [(fleet, method) for fleet in TENFOLD for method in UNEVEN]
    return [Entry(problem, *pair, seed) for seed in PROBLEMS[problem].seeds for pair in pairs]


def ordered(problems: list[str]) -> list[Entry]:
    """The most important first: what not waiting saves on LTE, all seeds; then the rest of that column; then fleets."""

    def place(entry: Entry) -> tuple[int, ...]:
        first = entry.fleet == TENFOLD[0] and entry.method in FIRST
        rank = FIRST.index(entry.method) // 2 if first else 2 + [TENFOLD[0], *EVEN, TENFOLD[1]].index(entry.fleet)
        return rank, entry.seed, problems.index(entry.problem)

    return sorted((entry for problem in problems for entry in entries(problem)), key=place)


class Beside(Clock):
    """A further clock around one: its own fleet's times go into the record under the fleet's name."""

    name = ""

    def notes(self) -> dict[str, Any]:
        spent, self.spent = self.spent, Spent(self.spent.round)
        found = {f"{self.name}: virtual_seconds": spent.seconds, f"{self.name}: joules": spent.joules}
        return {**self.inner.notes(), **found}


def clocks(link: BaseLink, federation: fedge.Federation, fleets: Mapping[str, Fleet]) -> BaseLink:
    for name, fleet in fleets.items():
        link = Beside(link, federation, fleet)
        link.name = name
    return link


def built(entry: Entry) -> Algorithm[Any]:
    """The algorithm of a run, with the seed's model."""
    problem = PROBLEMS[entry.problem]

    def model(outputs: int) -> torch.nn.Module:
        found: torch.nn.Module = getattr(fedge.models, problem.model)(outputs=outputs, seed=entry.seed)
        return found

    return METHODS[entry.method](problem, model)


def setting(algorithm: Any) -> dict[str, Any]:
    """How a model is trained: the local steps, and every field of the algorithm that is not the default."""
    while hasattr(algorithm, "inner"):
        algorithm = algorithm.inner
    values = {one.name: (getattr(algorithm, one.name), one.default) for one in fields(algorithm) if one.init}
    chosen = {name: value for name, (value, default) in values.items() if name in STEPS or value != default}
    return {name: value for name, value in chosen.items() if name != "model"}


def run(
    entry: Entry,
    engine: fedge.Engine,
    rounds: int | None = None,
    stop: Callable[[], bool] | None = None,
    fleets: Mapping[str, Fleet] = FLEETS,
) -> list[dict[str, Any]]:
    """The lines of a training run, none if it was stopped: of all fleets, if nobody is left out on any of them."""
    problem = PROBLEMS[entry.problem]
    data = fedge.data.load(problem.data)
    lists = fedge.partition.labels_per_client(data.train_y, clients=CLIENTS, labels=LABELS, seed=entry.seed)
    federation = fedge.Federation(data, lists)
    algorithm = built(entry)
    begin = time.perf_counter()
    link: BaseLink = Clock(engine.link(algorithm, federation), federation, fleets[entry.fleet])
    others = {} if Late.of(algorithm) else {name: fleet for name, fleet in fleets.items() if name != entry.fleet}
    found = fedge.train(
        algorithm,
        federation,
        rounds=rounds or problem.rounds,
        cohort=COHORT,
        seed=entry.seed,
        link=clocks(link, federation, others),
        stop=stop,
    )
    if found.stopped:
        return []
    where = {"device": engine.device, "torch": torch.__version__, "wall": time.perf_counter() - begin}
    where["setting"] = setting(algorithm)
    timed = [(entry, found.history)]
    timed += [(replace(entry, fleet=name), [_as_on(name, record) for record in found.history]) for name in others]
    return [{**asdict(one), **told(history, problem.target), **where} for one, history in timed]


def _as_on(fleet: str, record: dict[str, Any]) -> dict[str, Any]:
    return record | {what: record[f"{fleet}: {what}"] for what in ("virtual_seconds", "joules")}


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
    curve = [[float(f"{r[name]:.6g}") for r in history] for name in ("virtual_seconds", "test_accuracy")]
    return line | {"rounds_to": reached, "seconds": curve[0], "accuracy": curve[1]}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def lines(path: Path | None = None) -> list[dict[str, Any]]:
    path = RESULTS / "results.jsonl" if path is None else path
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
