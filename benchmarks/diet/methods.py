"""The rows: FedAvg and FedOVA with narrow networks, 8-bit uploads, a shared trunk, calibrated scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

import fedge
from fedge.core import Algorithm

Network = Callable[[int, float, int], nn.Module]  # outputs, width, seed
WINDOW = 20  # rounds in the mean of late parameters, as in the paper's tables


@dataclass(frozen=True)
class Problem:
    """What is trained on, and the step sizes that tuning chose at full width."""

    data: str
    network: Network
    rounds: int
    batch_size: int
    steps: dict[str, float]  # by kind of method
    target: float
    every: int  # rounds after which scores are calibrated
    cohorts: int  # that calibration asks
    seeds: tuple[int, ...]
    labels: int = 2


def _mlp(outputs: int, width: float, seed: int) -> nn.Module:
    return fedge.models.mlp(64, (round(32 * width),), outputs, seed=seed)


def _fmnist(outputs: int, width: float, seed: int) -> nn.Module:
    return fedge.models.fmnist_cnn(outputs, seed, width)


def _kws(outputs: int, width: float, seed: int) -> nn.Module:
    return fedge.models.kws_cnn(outputs, seed, width)


PROBLEMS = {
    "digits": Problem("digits", _mlp, 50, 10, {"avg": 0.2, "ova": 0.2, "shared": 0.2}, 0.85, 10, 5, (0, 1, 2)),
    "fmnist": Problem(
        "fashion_mnist", _fmnist, 120, 15, {"avg": 0.14, "ova": 0.07, "shared": 0.07}, 0.85, 40, 1, (0, 1, 2)
    ),
    "kws": Problem("speech_commands", _kws, 120, 15, {"avg": 0.07, "ova": 0.1, "shared": 0.05}, 0.80, 40, 1, (0, 1, 2)),
}


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    kind: str  # avg, ova or shared
    width: float = 1.0
    bits: int = 32

    @property
    def name(self) -> str:
        kind = {"avg": "FedAvg", "ova": "FedOVA", "shared": "SharedOVA"}[self.kind]
        width = {1.0: "", 0.5: ", half width", 0.25: ", quarter width", 0.125: ", eighth width"}[self.width]
        return f"{kind}{width}{'' if self.bits == 32 else f', {self.bits}-bit uploads'}"

    def build(self, problem: Problem, seed: int) -> Algorithm[Any]:
        """FedOVA is calibrated now and then, which leaves its training alone: the record tells the two apart."""
        settings: dict[str, Any] = {"lr": problem.steps[self.kind], "epochs": 5, "batch_size": problem.batch_size}
        network = problem.network(2 if self.kind == "ova" else 10, self.width, seed)
        trained = (fedge.SharedOVA if self.kind == "shared" else fedge.FedAvg)(network, **settings)
        whole: Algorithm[Any] = fedge.FedOVA(trained) if self.kind == "ova" else trained
        whole = whole if self.bits == 32 else fedge.Compressed(whole, fedge.Quantise(self.bits))
        whole = fedge.Averaged(whole, WINDOW) if problem.data != "digits" else whole
        return fedge.Calibrated(whole, problem.every, problem.cohorts) if self.kind == "ova" else whole


METHODS = (  # the most telling first: time on a machine may end
    Method("avg"),
    Method("shared"),
    Method("ova", 0.5),
    Method("ova", 0.25),
    Method("ova"),
    Method("avg", 0.5),
    Method("ova", 0.5, 8),
    Method("ova", 0.25, 8),
    Method("shared", 0.5),
    Method("avg", 1.0, 8),
    Method("avg", 0.25),
    Method("avg", 0.5, 8),
    Method("shared", 1.0, 8),
    Method("ova", 0.125),
    Method("ova", 1.0, 8),
    Method("shared", 0.25),
)
