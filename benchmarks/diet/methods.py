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
    steps: dict[str, float]  # by kind of method; where there is a grid, what is used until it was searched
    target: float
    every: int  # rounds after which scores are calibrated
    cohorts: int  # that calibration asks
    seeds: tuple[int, ...]
    server: dict[str, Any]  # of the spectral server step
    more: tuple[float, ...] = ()  # further targets
    labels: int = 2
    grid: tuple[float, ...] = ()  # step sizes that are tried for every row, on held-out data


def _mlp(outputs: int, width: float, seed: int) -> nn.Module:
    return fedge.models.mlp(64, (round(32 * width),), outputs, seed=seed)


def _fmnist(outputs: int, width: float, seed: int) -> nn.Module:
    return fedge.models.fmnist_cnn(outputs, seed, width)


def _kws(outputs: int, width: float, seed: int) -> nn.Module:
    return fedge.models.kws_cnn(outputs, seed, width)


PROBLEMS = {
    "digits": Problem(
        "digits", _mlp, 50, 10, {"avg": 0.5, "ova": 0.2, "shared": 0.2, "step": 0.2}, 0.85, 10, 5, (0, 1, 2),
        {"server_momentum": 0.5, "server_lr": 4.0}, (0.90, 0.93, 0.95), grid=(0.1, 0.2, 0.35, 0.5, 0.7, 1.0),
    ),
    "fmnist": Problem(
        "fashion_mnist", _fmnist, 120, 15, {"avg": 0.14, "ova": 0.07, "shared": 0.07, "step": 0.07}, 0.85, 40, 1,
        (0, 1, 2), {"server_momentum": 0.3, "server_lr": 6.0}, (0.88,),
    ),
    "kws": Problem(
        "speech_commands", _kws, 120, 15, {"avg": 0.07, "ova": 0.1, "shared": 0.05, "step": 0.07}, 0.80, 40, 1,
        (0, 1, 2), {"server_momentum": 0.3, "server_lr": 6.0}, (0.85, 0.88),
    ),
}  # fmt: skip


KINDS = {"avg": "FedAvg", "step": "FedAvg + server step", "ova": "FedOVA", "shared": "SharedOVA"}


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    kind: str  # avg, step (FedAvg with a spectral server step), ova or shared
    width: float = 1.0
    bits: int = 32

    @property
    def name(self) -> str:
        kind = KINDS[self.kind]
        width = {1.0: "", 0.5: ", half width", 0.25: ", quarter width", 0.125: ", eighth width"}[self.width]
        return f"{kind}{width}{'' if self.bits == 32 else f', {self.bits}-bit uploads'}"

    def build(self, problem: Problem, seed: int, lr: float | None = None) -> Algorithm[Any]:
        """FedOVA is calibrated now and then, which leaves its training alone: the record tells the two apart."""
        settings: dict[str, Any] = {"epochs": 5, "batch_size": problem.batch_size, "lr": lr or problem.steps[self.kind]}
        settings |= {"server_optimiser": "spectral", **problem.server} if self.kind == "step" else {}
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
    Method("avg", 0.25, 8),  # every diet of FedOVA has its FedAvg, and some the same with a server step
    Method("avg", 0.125),
    Method("step"),
    Method("step", 0.5, 8),
    Method("step", 0.25, 8),
)
