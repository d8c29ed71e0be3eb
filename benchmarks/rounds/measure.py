"""One training run, and what it needed to get where."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

import fedge
from fedge.algorithms import ALGORITHMS, Averaged
from fedge.core import Algorithm, Model, Params
from fedge.data import Data
from fedge.engine import TooFewReplies

from .gradients import passes
from .grid import Grid, Method, Problem, Row, Setting

Record = dict[str, Any]
STEPS: dict[str, dict[str, fedge.Spectral]] = {
    "optimiser": {"spectral": fedge.Spectral(), "spectral_fast": fedge.Spectral.fast()},
    "server_optimiser": {"spectral": fedge.Spectral.server(0.0)},
}


class OutOfTime(Exception):
    """The time that was given is over; the run at work is not stored."""


@dataclass(frozen=True, eq=False)
class Beside(Averaged):
    """The mean of late rounds, computed beside a run that is judged at its plain parameters."""

    def params(self, state: Any) -> Params:
        return self.inner.params(state["inner"])

    def scores(self, model: Model, state: Any, x: Tensor) -> Tensor:
        return self.inner.scores(model, state["inner"], x)

    def late(self) -> Averaged:
        return Averaged(self.inner, self.window)


def train(algorithm: Algorithm[Any], federation: fedge.Federation, device: str, **options: Any) -> fedge.Run[Any]:
    """The one call of the engine: compiled and in TF32 on a GPU."""
    fast = fedge.Engine(device, "tf32", compile=True) if torch.device(device).type == "cuda" else fedge.Engine(device)
    return fedge.train(algorithm, federation, engine=fast, **options)


@lru_cache(maxsize=4)
def data_of(name: str, validation: float) -> Data:
    return fedge.data.load(name, validation=validation)


def federation_of(problem: Problem, data: Data, seed: int) -> fedge.Federation:
    if problem.labels is None:
        lists = fedge.partition.iid(data.train_y, problem.clients, seed=seed)
    else:
        lists = fedge.partition.labels_per_client(data.train_y, problem.clients, labels=problem.labels, seed=seed)
    return fedge.Federation(data, lists)


def algorithm_of(row: Row, setting: Setting, grid: Grid, data: Data, seed: int) -> Beside:
    """The seed is that of the partition, the model and the training."""
    method = row.method
    outputs = data.classes if method.around is None else 2
    build = getattr(fedge.models, row.problem.model)
    size = {"inputs": prod(data.train_x.shape[1:])} if row.problem.model in ("mlp", "logistic") else {}
    model: nn.Module = build(**size, outputs=outputs, seed=seed)
    kinds: dict[str, Any] = {**ALGORITHMS}
    kind = kinds[method.algorithm]
    local = grid.common if "epochs" in {field.name for field in fields(kind)} else {}  # GIANT and DONE train nothing
    inner = kind(model, **local, **method.fixed, **setting)
    if method.around is not None:
        inner = kinds[method.around](inner, classes=data.classes)
    return Beside(inner, grid.final["window"])


@dataclass
class Going:
    """A run that may go on: what trained it and what it left."""

    algorithm: Beside
    federation: fedge.Federation
    run: fedge.Run[Any] | None
    records: list[Record]
    diverged: bool = False


def start(row: Row, setting: Setting, grid: Grid, seed: int, validation: float = 0.0) -> Going:
    data = data_of(row.problem.data, validation)
    return Going(algorithm_of(row, setting, grid, data, seed), federation_of(row.problem, data, seed), None, [])


def advance(
    going: Going, row: Row, rounds: int, seed: int, device: str, stop: Callable[[], bool], judge_train: bool = False
) -> None:
    """Train until there are so many rounds.

    A run has diverged if no client's answer is finite, or its loss is not, or it ends at under half its best accuracy.
    """
    left = rounds - len(going.records)
    if left <= 0 or going.diverged:
        return
    options: dict[str, Any] = {"cohort": row.problem.cohort, "seed": seed, "stop": stop}
    try:
        going.run = train(
            going.algorithm,
            going.federation,
            device,
            rounds=left,
            start=going.run,
            observe=fedge.Observe(evaluate_train=judge_train),
            on_round=going.records.append,
            **options,
        )
    except TooFewReplies:
        going.diverged = True
        return
    if going.run.stopped:
        raise OutOfTime
    curve, loss = [record["test_accuracy"] for record in going.records], going.records[-1]["test_loss"]
    going.diverged = not math.isfinite(loss) or curve[-1] < max(curve) / 2


def evaluations(algorithm: Algorithm[Any], federation: fedge.Federation) -> Tensor:
    """Gradients of single examples that each client computes in a round it takes part in, [K]."""
    jobs = (federation.label_counts() > 0).sum(1) if isinstance(algorithm, fedge.FedOVA) else 1
    found: Tensor = passes(algorithm) * federation.sizes * jobs
    return found


def described(going: Going, row: Row, grid: Grid) -> Record:
    """Curves and costs of a run so far."""
    records, each = going.records, evaluations(going.algorithm.inner, going.federation)
    costs = {
        "up": [record["up_bytes"] for record in records],
        "down": [record["down_bytes"] for record in records],
        "gradients": [int(each[record["cohort"]].sum()) for record in records],
        "seconds": [record["seconds"] for record in records],
    }
    total = {name: list(accumulate(values)) for name, values in costs.items()}
    found: Record = {
        "accuracy": [round(record["test_accuracy"], 5) for record in records],
        "dropped": sum(len(record["dropped"]) for record in records),
        "diverged": going.diverged,
        "spent": {name: values[-1] if values else 0 for name, values in total.items()},
    }
    if records and "train_accuracy" in records[0]:
        found["train_accuracy"] = [round(record["train_accuracy"], 5) for record in records]
    found["to"] = {
        **{f"test {goal:g}": reached(found["accuracy"], goal, total) for goal in row.problem.test},
        **{f"train {goal:g}": reached(found.get("train_accuracy", []), goal, total) for goal in row.problem.train},
    }
    if records and going.run is not None and (names := going.algorithm.notes(going.run.state)):
        found["notes"] = {name: records[-1].get(name) for name in names}  # of the last round
    return found | products(row.method)


def products(method: Method) -> Record:
    """How spectral steps multiply matrices: at the clients, at the server."""
    named = {place: rules.get(method.fixed.get(place, "")) for place, rules in STEPS.items()}
    found = {place: rule.products for place, rule in named.items() if rule is not None}
    return {"products": found} if found else {}


def reached(curve: list[float], goal: float, total: dict[str, list[float]]) -> Record | None:
    """The first round at the goal and what had been spent by then; None if it was never there."""
    at = next((i for i, value in enumerate(curve) if value >= goal), None)
    return None if at is None else {"rounds": at + 1, **{name: values[at] for name, values in total.items()}}


def late_accuracy(going: Going) -> float | None:
    """Test accuracy of the mean of late rounds."""
    if going.run is None or going.diverged:
        return None
    averaged = fedge.Run(going.algorithm.late(), going.run.state, going.run.handle)
    data = going.federation.data
    guess = averaged.predict(data.test_x).cpu()
    return float((guess == data.test_y).double().mean())


def machine(device: str) -> Record:
    kind = torch.cuda.get_device_name() if torch.device(device).type == "cuda" else platform.machine()
    return {"device": kind, "torch": torch.__version__.split("+")[0], "fedge": fedge.__version__}


def now() -> float:
    return time.perf_counter()
