"""The workloads: what is trained, by whom, and how much of it.

Inputs are random numbers of the right shape: arithmetic takes the same time on them as on pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fedge import models
from fedge.algorithms import FedAvg, FedOVA, FisherLBFGS
from fedge.bench.networks import TIMES, WORDS, Reader, ResNet, Transformer
from fedge.core import Algorithm
from fedge.data import Data, load
from fedge.federation import Federation
from fedge.partition import iid

POOL = 6000  # distinct examples; clients draw theirs from it with overlap


@dataclass(frozen=True)
class Workload:
    """`build(gpu)` makes the algorithm and the federation; a GPU gets more local epochs where that is usual."""

    name: str
    title: str
    build: Callable[[bool], tuple[Algorithm[Any], Federation]]
    cohort: int
    devices: tuple[str, ...] = ("cpu", "cuda")
    loop_threads: int | None = None  # with which the plain loop is fastest; None: all


def images(shape: tuple[int, ...], clients: int, each: int, labels: int = 10, classes: int = 10) -> Federation:
    """Random images; every client draws `each` of those with its own few labels."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(POOL, *shape, generator=g)
    y = torch.arange(POOL) % classes
    rng = np.random.default_rng(0)
    own = [(np.arange(labels) + client) % classes for client in range(clients)]
    lists = [rng.choice(np.flatnonzero(np.isin(y.numpy(), own[k])), each, replace=False) for k in range(clients)]
    return Federation(Data(x, y, x[:1000], y[:1000], classes), lists)


def digits(clients: int, each: int | None = None) -> Federation:
    data = load("digits")
    if each is None:
        return Federation(data, iid(data.train_y, clients, seed=0))
    rng = np.random.default_rng(0)
    return Federation(data, [rng.choice(len(data.train_y), each, replace=False) for _ in range(clients)])


def small_cnn(outputs: int = 10) -> nn.Module:
    """The CIFAR-shaped network of many simulators' benchmarks: two valid convolutions, one pool, dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, outputs),
    )  # fmt: skip


def _a(gpu: bool) -> tuple[Algorithm[Any], Federation]:
    return FedAvg(models.fmnist_cnn(seed=0), epochs=5 if gpu else 1), images((1, 28, 28), 100, 600)


def _b(gpu: bool) -> tuple[Algorithm[Any], Federation]:
    return FedAvg(models.mlp(seed=0), epochs=5, batch_size=10), digits(100)


def _c(gpu: bool) -> tuple[Algorithm[Any], Federation]:
    return FedAvg(models.mlp(seed=0), epochs=1, batch_size=10), digits(1000, 14)


def _d(gpu: bool) -> tuple[Algorithm[Any], Federation]:
    return FedAvg(small_cnn(), epochs=1, batch_size=10), images((3, 32, 32), 1000, 50)


def _e(gpu: bool) -> tuple[Algorithm[Any], Federation]:
    return FedAvg(models.vgg11(seed=0), lr=0.01), images((3, 32, 32), 100, 500)


def _f_on_a(gpu: bool) -> tuple[Algorithm[Any], Federation]:
    inner = FedAvg(models.fmnist_cnn(outputs=2, seed=0), epochs=5 if gpu else 1)
    return FedOVA(inner), images((1, 28, 28), 100, 600, labels=2)


def _f_on_e(gpu: bool) -> tuple[Algorithm[Any], Federation]:
    return FedOVA(FedAvg(models.vgg11(outputs=2, seed=0), lr=0.01)), images((3, 32, 32), 100, 500, labels=2)


def _g(gpu: bool) -> tuple[Algorithm[Any], Federation]:
    return FisherLBFGS(models.fmnist_cnn(seed=0), epochs=5 if gpu else 1), images((1, 28, 28), 100, 600)


def texts(clients: int, each: int) -> Federation:
    """Random characters, and one to predict."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, WORDS, (POOL, TIMES), generator=g), torch.randint(0, WORDS, (POOL,), generator=g)
    rng = np.random.default_rng(0)
    return Federation(
        Data(x, y, x[:1000], y[:1000], WORDS), [rng.choice(POOL, each, replace=False) for _ in range(clients)]
    )


def _graph(make: Callable[[bool], nn.Module], each: int, pictures: bool = False) -> Any:
    """FedAvg on a network that is not a chain; 100 clients with so many examples each."""

    def build(gpu: bool) -> tuple[Algorithm[Any], Federation]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            algorithm = FedAvg(make(gpu), epochs=1, batch_size=10)
        return algorithm, images((3, 32, 32), 100, each) if pictures else texts(100, each)

    return build


def _residual(gpu: bool) -> nn.Module:
    return ResNet((64, 128, 256, 512), 2) if gpu else ResNet()


def _adapted(gpu: bool) -> nn.Module:
    return models.lora(Transformer(), rank=4, train=("out",))


SMALL, LARGE = 10, 60  # examples per client: one local step, and six


def _graphs() -> list[Workload]:
    kinds: dict[str, tuple[str, Callable[[bool], nn.Module], bool]] = {
        "R": ("residual net with group norm, CIFAR shapes (GPU: ResNet-18)", _residual, True),
        "L": ("two-layer LSTM of width 64, 20 characters", lambda gpu: Reader(nn.LSTM), False),
        "U": ("two-layer GRU of width 64, 20 characters", lambda gpu: Reader(nn.GRU), False),
        "T": ("four-layer transformer of width 32, 20 characters", lambda gpu: Transformer(), False),
        "TA": ("adapters of rank 4 on T", _adapted, False),
    }
    return [
        Workload(f"{name}{mark}", f"{title}, 20 of 100 clients x {each}, B 10, E 1", _graph(make, each, pictures), 20)
        for name, (title, make, pictures) in kinds.items()
        for mark, each in (("", SMALL), ("2", LARGE))
    ]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("A", "F-MNIST CNN, 20 of 100 clients x 600, B 15", _a, 20),
        Workload("B", "digits MLP 64-32-10, 20 of 100 clients, E 5, B 10", _b, 20, loop_threads=1),
        Workload("C", "digits MLP, 200 of 1000 clients x 14, E 1", _c, 200, loop_threads=1),
        Workload("D", "CIFAR-shaped CNN, 50 of 1000 clients x 50, B 10, E 1", _d, 50),
        Workload("E", "VGG11, 20 of 100 clients x 500, B 15, E 5", _e, 20, ("cuda",)),
        Workload("FA", "FedOVA with 2 labels per client on A", _f_on_a, 20),
        Workload("FE", "FedOVA with 2 labels per client on E", _f_on_e, 20, ("cuda",)),
        Workload("G", "Fisher L-BFGS on A", _g, 20),
        *_graphs(),
    )
}
