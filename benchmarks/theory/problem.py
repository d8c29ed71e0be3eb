"""Digits as an optimisation problem: the objective, its minimum by SciPy, and runs that are watched from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value

import fedge
from fedge import tree
from fedge.core import Params
from fedge.handle import parameters

DIGITS = fedge.data.load("digits")
CLIENTS = 100


@dataclass(frozen=True, eq=False)
class Objective:
    """f(w) = mean over all training examples of the cross entropy + l2/2 |w|^2, in float64.

    The mean over all examples is the n_k-weighted mean over all clients, whatever the partition.
    """

    model: nn.Module
    l2: float
    x: Tensor = field(default_factory=lambda: DIGITS.train_x.double())
    y: Tensor = field(default_factory=lambda: DIGITS.train_y)

    def __call__(self, params: Params) -> Tensor:
        loss = F.cross_entropy(functional_call(self.model, params, (self.x,)), self.y)
        return loss + self.l2 / 2 * tree.dot(params, params)

    def squared_gradient(self, params: Params) -> float:
        """|grad f(w)|^2."""
        gradient = grad(self)(params)
        return float(tree.dot(gradient, gradient))

    def start(self) -> Params:
        """w_0, the module's own weights."""
        return {name: leaf.detach() for name, leaf in parameters(self.model).items()}


def minimum(f: Objective) -> dict[str, float]:
    """f* by SciPy's L-BFGS-B, and the most it can be off: |grad f|^2 / (2 l2), as f is l2-strongly convex."""
    like = f.start()

    def value_and_gradient(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        gradient, value = grad_and_value(f)(_split(torch.from_numpy(flat), like))
        return float(value), torch.cat([leaf.flatten() for leaf in gradient.values()]).numpy()

    options = {"maxiter": 10_000, "maxfun": 20_000, "ftol": 1e-16, "gtol": 1e-11, "maxcor": 50}
    found = minimize(value_and_gradient, np.zeros(tree.size(like)), jac=True, method="L-BFGS-B", options=options)
    norm = float(np.linalg.norm(found.jac))
    return {"value": float(found.fun), "gradient_norm": norm, "error_bound": norm**2 / (2 * f.l2)}


def _split(flat: Tensor, like: Params) -> Params:
    pieces = flat.split([leaf.numel() for leaf in like.values()])
    return {name: piece.view_as(leaf) for (name, leaf), piece in zip(like.items(), pieces, strict=True)}


@dataclass(frozen=True, eq=False)
class Watched(fedge.FisherLBFGS):
    """FisherLBFGS with one more number in the record of every round, computed over all data and sent nowhere."""

    watch: Callable[[Params], float] = lambda params: float("nan")

    def notes(self, state: Any) -> dict[str, Any]:
        return super().notes(state) | {"watched": self.watch(state["params"])}


def federation(kind: str) -> fedge.Federation:
    """ "IID", "non-IID-2" or "one client"."""
    y = DIGITS.train_y
    if kind == "one client":
        return fedge.Federation(DIGITS, [range(len(y))])
    if kind == "IID":
        return fedge.Federation(DIGITS, fedge.partition.iid(y, CLIENTS, seed=0))
    return fedge.Federation(DIGITS, fedge.partition.labels_per_client(y, CLIENTS, labels=2, seed=0))


def watched(
    kind: str, rounds: int, cohort: int | None, watch: Callable[[Params], float], **options: Any
) -> list[float]:
    """What was watched after every round of the theory's algorithm: gradients at w_t, Gauss-Newton products."""
    theory: dict[str, Any] = {"source": "gradient", "curvature": "product", "matrix": "gauss_newton", "batch_size": 5}
    algorithm = Watched(**(theory | options), watch=watch)
    run = fedge.train(
        algorithm, federation(kind), rounds=rounds, cohort=cohort, observe=fedge.Observe(evaluate_every=rounds)
    )
    return [record["watched"] for record in run.history]
