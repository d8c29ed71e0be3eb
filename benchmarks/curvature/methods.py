"""The methods of docs/curvature.md, eight settings each."""

from __future__ import annotations

from typing import Any

import fedge
from benchmarks.algorithms.methods import Method, grid, network

LOCAL: dict[str, Any] = {"epochs": 5, "batch_size": 10}
NEWTON: dict[str, Any] = {"curvature": "product", "matrix": "gauss_newton"}


def fedavg(seed: int, **setting: Any) -> fedge.FedAvg:
    return fedge.FedAvg(network(seed), **LOCAL, **setting)


def lbfgs(seed: int, **setting: Any) -> fedge.FisherLBFGS:
    return fedge.FisherLBFGS(network(seed), **LOCAL, **setting)


def diagonal(seed: int, **setting: Any) -> fedge.FisherLBFGS:
    return lbfgs(seed, direction="diagonal", **setting)


def product(seed: int, **setting: Any) -> fedge.FisherLBFGS:
    return lbfgs(seed, **NEWTON, **setting)


def slopes(seed: int, **setting: Any) -> fedge.FisherLBFGS:
    return lbfgs(seed, curvature="product", matrix="squared_slopes", **setting)


def gradient(seed: int, **setting: Any) -> fedge.FisherLBFGS:
    return lbfgs(seed, source="gradient", **NEWTON, **setting)


def chosen_damping(seed: int, **setting: Any) -> fedge.FisherLBFGS:
    return gradient(seed, dampings=(0.01, 0.03, 0.1, 0.3, 1.0), **setting)


def subspace(seed: int, **setting: Any) -> fedge.SubspaceNewton:
    return fedge.SubspaceNewton(network(seed), **LOCAL, **setting)


def start(seed: int, **setting: Any) -> fedge.SubspaceNewton:
    return subspace(seed, centre="start", **setting)


def fisher(seed: int, **setting: Any) -> fedge.SubspaceNewton:
    return subspace(seed, matrix="fisher", **setting)


def giant(seed: int, **setting: Any) -> fedge.GIANT:
    return fedge.GIANT(network(seed), **setting)


def done(seed: int, **setting: Any) -> fedge.DONE:
    return fedge.DONE(network(seed), **setting)


PRINTED = "Fisher L-BFGS, as printed"
DAMPED = grid(local_lr=(0.1, 0.2, 0.35, 0.5), damping=(0.3, 1.0))
SPANS = grid(lr=(0.1, 0.2, 0.35, 0.5), memory=(1, 3))
METHODS = (
    Method("FedAvg", "control", fedavg, grid(lr=(0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0))),
    Method("FedAvg, server step", "control", fedavg, grid(lr=(0.1, 0.2, 0.35, 0.5), server_lr=(2.0, 1 / 0.3))),
    Method("FedAvg, server momentum", "control", fedavg, grid(lr=(0.1, 0.2, 0.35, 0.5), server_momentum=(0.5, 0.8))),
    Method(PRINTED, "diagonal Fisher, of the update", lbfgs, DAMPED),
    Method("Diagonal preconditioning", "control: no pairs, of the update", diagonal, DAMPED),
    Method("Fisher L-BFGS, product", "Gauss-Newton, of the update", product, DAMPED),
    Method("Fisher L-BFGS, squared slopes", "JᵀΓJ, of the update", slopes, DAMPED),
    Method(
        "Fisher L-BFGS, gradient",
        "Gauss-Newton, of the gradient",
        gradient,
        grid(lr=(0.3, 1.0), damping=(0.03, 0.1, 0.3, 1.0)),
    ),
    Method(
        "Fisher L-BFGS, chosen damping",
        "the same, five dampings tried by the clients",
        chosen_damping,
        grid(lr=(0.3, 0.5, 0.7, 1.0), damping=(0.1, 1.0)),
    ),
    Method("Subspace Newton", "Gauss-Newton, centre w + u", subspace, SPANS),
    Method("Subspace Newton at w", "Gauss-Newton, centre w", start, SPANS),
    Method("Subspace Newton, Fisher", "empirical Fisher, centre w + u", fisher, SPANS),
    Method(
        "GIANT", "Gauss-Newton, conjugate gradients", giant, grid(damping=(0.003, 0.01, 0.03, 0.1), iterations=(5, 20))
    ),
    Method(
        "DONE", "Gauss-Newton, Richardson iterations", done, grid(alpha=(0.03, 0.05, 0.1, 0.2), iterations=(20, 80))
    ),
)
