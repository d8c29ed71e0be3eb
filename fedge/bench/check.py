"""Do the engines agree? Every algorithm, on ragged clients, through every engine that this machine has."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from fedge import models, partition
from fedge.algorithms import GIANT, SCAFFOLD, DataSharing, FedAvg, FedDANE, FedOVA, FedPer, FisherLBFGS, SubspaceNewton
from fedge.core import Algorithm, Params
from fedge.data import Data
from fedge.engine import Loopback, Simulator
from fedge.federation import Federation
from fedge.handle import parameters
from fedge.hooks import Observe
from fedge.loop import train


@dataclass(frozen=True)
class Setting:
    """What is compared, and how closely: rounds on ragged clients, or a few local steps from the same point."""

    dtype: torch.dtype
    rounds: int
    epochs: int
    most: int | None  # examples per client
    tolerance: float

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


SETTINGS = (Setting(torch.float64, 3, 2, None, 1e-10), Setting(torch.float32, 1, 1, 20, 1e-5))  # 20 / B: five steps


def problem(image: bool, setting: Setting = SETTINGS[0]) -> Federation:
    """Small clusters, dealt unevenly, as vectors or as pictures."""
    g = torch.Generator().manual_seed(0)
    shape = (2, 6, 6) if image else (12,)
    y = torch.arange(150) % 3
    centres = torch.randn(3, *shape, generator=g, dtype=torch.float64)
    x = (centres[y] + torch.randn(150, *shape, generator=g, dtype=torch.float64)).to(setting.dtype)
    data = Data(x[:120], y[:120], x[120:], y[120:], 3)
    lists = partition.dirichlet(data.train_y, clients=8, alpha=0.6, seed=1)
    return Federation(data, [one[: setting.most] for one in lists])


def network(image: bool, outputs: int, dtype: torch.dtype) -> nn.Module:
    if not image:
        return models.mlp(12, (7,), outputs, seed=0).to(dtype)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2), nn.Conv2d(4, 40, 3)]
        return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(40, outputs)).to(dtype)


def algorithms(image: bool, setting: Setting = SETTINGS[0]) -> dict[str, Algorithm[Any]]:
    """One of each kind that takes another path through an engine."""
    size: dict[str, Any] = {"epochs": setting.epochs, "batch_size": 4}

    def model(outputs: int = 3) -> nn.Module:
        return network(image, outputs, setting.dtype)

    def local(outputs: int = 3, **options: Any) -> FedAvg:
        return FedAvg(model(outputs), **size, **options)

    def lbfgs(outputs: int = 3, **options: Any) -> FisherLBFGS:
        return FisherLBFGS(model(outputs), **size, memory=2, **options)

    newton: dict[str, Any] = {"source": "gradient", "curvature": "product", "matrix": "gauss_newton", "lr": 0.3}
    return {
        "fedavg": local(),
        "fedavg momentum": local(momentum=0.9, weight_decay=0.01, lr=0.02),
        "fedavg adam": local(optimiser="adam", lr=0.01),
        "fedavg clip": local(clip=0.3),
        "scaffold": SCAFFOLD(model(), **size),
        "fedper": FedPer(model(), **size),
        "feddane": FedDANE(model(), **size),
        "fisher l-bfgs, diagonal": lbfgs(),
        "fisher l-bfgs, product": lbfgs(**newton),
        "giant": GIANT(model(), iterations=3),
        "subspace newton": SubspaceNewton(model(), **size),
        "fedova": FedOVA(local(2), classes=3),
        "fedova, fisher l-bfgs": FedOVA(lbfgs(2), classes=3),
        "fedova, scaffold": FedOVA(SCAFFOLD(model(2), **size), classes=3),
        "data sharing": DataSharing(local(), beta=0.3),
    }


COMPILED = ("fedavg", "fedavg adam", "fedova")  # those that a GPU also tries compiled, which takes a while


def engines(name: str, algorithm: Algorithm[Any], federation: Federation, device: str) -> dict[str, Any]:
    found = {
        "one by one": lambda: Simulator(algorithm, federation, chunk=1, workers=1),
        "three workers": lambda: Simulator(algorithm, federation, chunk=1, workers=3),
        "stacked": lambda: Simulator(algorithm, federation, chunk=100),
        "stacked, autograd": lambda: Simulator(algorithm, federation, chunk=100, written=False),
        "stacked in chunks": lambda: Simulator(algorithm, federation, chunk=3),
    }
    if device != "cpu":
        found[device] = lambda: Simulator(algorithm, federation, device=device)
        found[f"{device} in chunks"] = lambda: Simulator(algorithm, federation, device=device, chunk=3)
        found[f"{device}, autograd"] = lambda: Simulator(algorithm, federation, device=device, written=False)
        if name in COMPILED:
            found[f"{device}, compiled"] = lambda: Simulator(algorithm, federation, device=device, compile=True)
    return found


class Gap(NamedTuple):
    """The largest difference of one engine's parameters to those of the loop-back link, and how far these went."""

    algorithm: str
    engine: str
    size: float
    agrees: bool
    moved: float


NAMES = tuple(algorithms(False, SETTINGS[0]))


def check(device: str = "cpu", chosen: Collection[str] = NAMES) -> Iterator[Gap]:
    """Every engine against the loop-back link, one after another."""
    for setting, image in product(SETTINGS, (False, True)):
        federation = problem(image, setting)
        for name, algorithm in algorithms(image, setting).items():
            if name not in chosen:
                continue
            options: dict[str, Any] = {
                "rounds": setting.rounds,
                "cohort": 6,
                "seed": 5,
                "observe": Observe(evaluate_every=3),
            }
            reference = train(algorithm, federation, link=Loopback(algorithm, federation), **options).params
            start = parameters(algorithm.model)
            moved = largest(reference, start)
            title = f"{name} ({'convolutions' if image else 'mlp'}, {setting.name})"
            for engine, make in engines(name, algorithm, federation, device).items():
                found = train(algorithm, federation, link=make(), **options).params
                gap = largest(found, reference)
                yield Gap(title, engine, gap, gap <= setting.tolerance, moved)


def largest(found: Params, reference: Params) -> float:
    """The largest difference; a model for every class may be compared with one."""
    return max(float((found[key].cpu() - reference[key]).abs().max()) for key in reference)
