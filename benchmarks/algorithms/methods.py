"""The methods of the table, each with six settings to choose from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import nn

import fedge
from fedge.core import Algorithm

Setting = dict[str, float]
EPOCHS, BATCH_SIZE, HIDDEN = 5, 15, 32


@dataclass(frozen=True)
class Method:
    """A row of the table: how it is built from a model's seed and a setting, and the settings that are tried."""

    name: str
    mode: str
    build: Callable[..., Algorithm[Any]]  # (seed, **setting)
    grid: tuple[Setting, ...]


def network(seed: int, outputs: int = 10) -> nn.Module:
    return fedge.models.mlp(64, (HIDDEN,), outputs, seed=seed)


def grid(**axes: tuple[float, ...]) -> tuple[Setting, ...]:
    return tuple(dict(zip(axes, values, strict=True)) for values in product(*axes.values()))


def fedavg(seed: int, outputs: int = 10, **setting: Any) -> fedge.FedAvg:
    return fedge.FedAvg(network(seed, outputs), epochs=EPOCHS, batch_size=BATCH_SIZE, **setting)


def adam(seed: int, lr: float) -> fedge.FedAvg:
    return fedavg(seed, lr=lr, optimiser="adam")


def feddane(seed: int, **setting: Any) -> fedge.FedDANE:
    return fedge.FedDANE(network(seed), epochs=EPOCHS, batch_size=BATCH_SIZE, **setting)


def sharing(beta: float) -> Callable[..., Algorithm[Any]]:
    return lambda seed, lr: fedge.DataSharing(fedavg(seed, lr=lr), beta=beta)


def lbfgs(seed: int, outputs: int = 10, **setting: Any) -> fedge.FisherLBFGS:
    return fedge.FisherLBFGS(network(seed, outputs), epochs=EPOCHS, batch_size=BATCH_SIZE, **setting)


def newton(seed: int, **setting: Any) -> fedge.FisherLBFGS:
    return lbfgs(seed, source="gradient", curvature="product", matrix="gauss_newton", **setting)


def fedova(seed: int, lr: float) -> fedge.FedOVA:
    return fedge.FedOVA(fedavg(seed, outputs=2, lr=lr))


def fedova_lbfgs(seed: int, **setting: Any) -> fedge.FedOVA:
    return fedge.FedOVA(lbfgs(seed, outputs=2, **setting))


LOCAL = f"E = {EPOCHS}, B = {BATCH_SIZE}"
UPDATE = f'{LOCAL}, source "update", diagonal Fisher, m = 10'
STEPS = grid(lr=(0.02, 0.05, 0.1, 0.2, 0.5, 1.0))
DIAGONAL = grid(local_lr=(0.2, 0.5, 1.0), damping=(0.3, 1.0))
METHODS = (
    Method("FedAvg", LOCAL, fedavg, STEPS),
    Method("FedAvg-Adam", f"{LOCAL}, local Adam", adam, grid(lr=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3))),
    Method("FedDANE", f"{LOCAL}, same cohort in both phases", feddane, grid(lr=(0.1, 0.2, 0.5), mu=(0.1, 1.0))),
    *(
        Method(f"Data sharing {100 * b:.0f} %", f"{LOCAL}, over FedAvg", sharing(b), STEPS)
        for b in (0.05, 0.1, 0.2, 0.5)
    ),
    Method("FedOVA", f"{LOCAL}, over FedAvg", fedova, STEPS),
    Method("FisherLBFGS", UPDATE, lbfgs, DIAGONAL),
    Method(
        "FisherLBFGS, product",
        'source "gradient", product with Gauss-Newton, m = 10',
        newton,
        grid(lr=(0.1, 0.3, 1.0), damping=(0.1, 1.0)),
    ),
    Method("FedOVA over FisherLBFGS", UPDATE, fedova_lbfgs, DIAGONAL),
)
