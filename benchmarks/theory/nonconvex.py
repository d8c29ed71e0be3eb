"""Theorem 2: a small network on digits, the running mean of |grad f(w_t)|^2 against rounds with a constant step."""

from __future__ import annotations

from typing import Any

import numpy as np

import fedge

from .pictures import draw_nonconvex
from .problem import Objective, watched
from .store import digits, save, save_picture

L2, DAMPING = 1e-3, 0.1
STEPS = (1.0, 0.3, 0.1, 0.05)
PARTITIONS = ("IID", "non-IID-2")
ROUNDS, LAST, EVERY, COHORT = 1000, 250, 5, 20


def objective() -> Objective:
    return Objective(fedge.models.mlp(64, (32,), 10, seed=0).double(), L2)


def descent(f: Objective, kind: str, step: float) -> dict[str, Any]:
    """One run with one batch of 5 a client: the mean of |grad f(w_0)|^2 ... |grad f(w_{T-1})|^2 for every T."""
    options = {"model": f.model, "weight_decay": L2, "damping": DAMPING, "batches": 1, "lr": step}
    squares = [f.squared_gradient(f.start()), *watched(kind, ROUNDS, COHORT, f.squared_gradient, **options)][:-1]
    running = np.cumsum(squares) / np.arange(1, ROUNDS + 1)
    numbers = {"first": squares[0], "highest": float(running.max()), "running_mean": float(running[-1])}
    numbers["neighbourhood"] = float(np.mean(squares[-LAST:]))
    return {"partition": kind, "step": step, **numbers, "curve": digits(running[::EVERY].tolist())}


def main() -> None:
    f = objective()
    config = {"l2": L2, "damping": DAMPING, "model": "64-32-10", "clients": 100, "cohort": COHORT, "rounds": ROUNDS}
    config |= {"last": LAST, "every": EVERY, "batch_size": 5, "batches": 1, "seed": 0}
    runs = [descent(f, kind, step) for kind in PARTITIONS for step in STEPS]
    result = {"config": config, "runs": runs}
    save("nonconvex", result)
    save_picture("nonconvex", draw_nonconvex(result, PARTITIONS))
