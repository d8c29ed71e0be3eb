"""The methods of docs/curvature.md, eight settings each."""

from __future__ import annotations

from typing import Any

import fedge
from benchmarks.algorithms.methods import Method, grid, network

LOCAL: dict[str, Any] = {"epochs": 5, "batch_size": 10}
TURNED: dict[str, Any] = {"server_optimiser": "spectral", "server_momentum": 0.5}
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


def foof(seed: int, **setting: Any) -> fedge.FOOF:
    return fedge.FOOF(network(seed), **LOCAL, **setting)


def turned(seed: int, **setting: Any) -> fedge.FedAvg:
    return fedavg(seed, **TURNED, **setting)


def foof_turned(seed: int, **setting: Any) -> fedge.FOOF:
    return foof(seed, **TURNED, **setting)


def spectral(seed: int, **setting: Any) -> fedge.FedAvg:
    return fedavg(seed, optimiser="spectral", inner_decay=0.2, **setting)


def carried(seed: int, **setting: Any) -> fedge.FedAvg:
    return spectral(seed, carry_momentum=True, **setting)


def both(seed: int, **setting: Any) -> fedge.FedAvg:
    return spectral(seed, momentum=0.95, **TURNED, **setting)


def control(seed: int, **setting: Any) -> fedge.SCAFFOLD:
    return fedge.SCAFFOLD(network(seed), **LOCAL, **TURNED, **setting)


def mixed(seed: int, **setting: Any) -> fedge.FedCM:
    return fedge.FedCM(network(seed), **LOCAL, **TURNED, **setting)


PRINTED = "Fisher L-BFGS, as printed"
DAMPED = grid(local_lr=(0.1, 0.2, 0.35, 0.5), damping=(0.3, 1.0))
STEPS = grid(lr=(0.1, 0.2, 0.35, 0.5), server_lr=(2.0, 4.0))
LENGTHS = (0.02, 0.05, 0.1, 0.2)
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
    Method(
        "FOOF",
        "second moments of layers' inputs, local steps",
        foof,
        grid(lr=(0.2, 0.35, 0.5, 0.7), damping=(0.3, 1.0)),
    ),
    Method(
        "FOOF, server step",
        "the same, control's server step",
        foof,
        grid(lr=(0.2, 0.35), damping=(0.3, 1.0), server_lr=(1.5, 2.0)),
    ),
    Method("Spectral server step", "Kronecker factors of the mean update", turned, STEPS),
    Method(
        "FOOF, spectral server step", "both", foof_turned, grid(lr=(0.1, 0.2), damping=(0.3, 1.0), server_lr=(2.0, 4.0))
    ),
    Method(
        "Spectral", "Kronecker factors of the momentum, local steps", spectral, grid(lr=LENGTHS, lr_decay=(0.95, 1.0))
    ),
    Method("Spectral carried", "the same, carried momentum", carried, grid(lr=LENGTHS, momentum=(0.95, 0.98))),
    Method("Spectral, spectral server step", "both", both, grid(lr=LENGTHS, server_lr=(1.0, 2.0))),
    Method(
        "Spectral server step, warm-up",
        "over 5 rounds",
        turned,
        grid(lr=(0.1, 0.2, 0.35, 0.5), server_lr=(2.0, 4.0), server_warmup=(5,)),
    ),
    Method("SCAFFOLD, spectral server step", "control variates", control, STEPS),
    Method(
        "FedCM, spectral server step",
        "mean direction mixed in",
        mixed,
        grid(lr=(0.2, 0.35), alpha=(0.4, 0.7), server_lr=(2.0, 4.0)),
    ),
)
