"""Do the engines agree? Every algorithm, on ragged clients, through every engine that this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fedge import models, partition
from fedge.algorithms import DataSharing, FedAvg, FedDANE, FedOVA, FisherLBFGS
from fedge.core import Algorithm
from fedge.data import Data
from fedge.engine import Loopback, Simulator
from fedge.federation import Federation
from fedge.train import train

TOLERANCE = 1e-10  # float64, three rounds


def problem(image: bool) -> Federation:
    """Small clusters, dealt unevenly, as vectors or as pictures, in float64."""
    g = torch.Generator().manual_seed(0)
    shape = (2, 6, 6) if image else (12,)
    y = torch.arange(150) % 3
    centres = torch.randn(3, *shape, generator=g, dtype=torch.float64)
    x = centres[y] + torch.randn(150, *shape, generator=g, dtype=torch.float64)
    data = Data(x[:120], y[:120], x[120:], y[120:], 3)
    return Federation(data, partition.dirichlet(data.train_y, clients=8, alpha=0.6, seed=1))


def network(image: bool, outputs: int) -> nn.Module:
    if not image:
        return models.mlp(12, (7,), outputs, seed=0).double()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2), nn.Conv2d(4, 40, 3)]
        return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(40, outputs)).double()


def algorithms(image: bool) -> dict[str, Algorithm[Any]]:
    """One of each kind that takes another path through an engine."""

    def local(outputs: int = 3, **options: Any) -> FedAvg:
        return FedAvg(network(image, outputs), epochs=2, batch_size=4, **options)

    def lbfgs(outputs: int = 3, **options: Any) -> FisherLBFGS:
        return FisherLBFGS(network(image, outputs), epochs=2, batch_size=4, memory=2, **options)

    newton: dict[str, Any] = {"source": "gradient", "curvature": "product", "matrix": "gauss_newton", "lr": 0.3}
    return {
        "fedavg": local(),
        "fedavg momentum": local(momentum=0.9, weight_decay=0.01, lr=0.02),
        "fedavg adam": local(optimiser="adam", lr=0.01),
        "feddane": FedDANE(network(image, 3), epochs=2, batch_size=4),
        "fisher l-bfgs, diagonal": lbfgs(),
        "fisher l-bfgs, product": lbfgs(**newton),
        "fedova": FedOVA(local(2), classes=3),
        "fedova, fisher l-bfgs": FedOVA(lbfgs(2), classes=3),
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


def check(device: str = "cpu") -> Iterator[tuple[str, str, float]]:
    """(algorithm, engine, largest difference to the loop-back link), one after another."""
    for image in (False, True):
        federation = problem(image)
        for name, algorithm in algorithms(image).items():
            settings: dict[str, Any] = {"rounds": 3, "cohort": 6, "seed": 5, "evaluate_every": 3}
            reference = train(algorithm, federation, link=Loopback(algorithm, federation), **settings).params
            for engine, make in engines(name, algorithm, federation, device).items():
                found = train(algorithm, federation, link=make(), **settings).params
                gap = max(float((found[key].cpu() - reference[key]).abs().max()) for key in reference)
                yield f"{name} ({'convolutions' if image else 'mlp'})", engine, gap
