"""Theorem 1: logistic regression on digits, f(w_t) - f* against rounds with a constant step.

Linear to a neighbourhood that shrinks with the step, with more batches and with more clients; to 1e-8 without noise;
the other forms of the curvature on the same problem; and the rounds that gradient descent needs.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np

import fedge

from .descent import best_step, descend
from .pictures import draw_forms, draw_noise
from .problem import Objective, minimum, watched
from .store import digits, save, save_picture

L2 = 1e-3
PARTITIONS = ("IID", "non-IID-2")
ROUNDS, LAST = 1000, 250  # of the noisy runs; the neighbourhood is the median of the last ones
EVERY = 5  # rounds between two points of a stored curve
EXACT_ROUNDS = 150
FORM_ROUNDS = 200
TOLERANCE = 1e-6  # of the race against gradient descent
NOISE: dict[str, list[dict[str, Any]]] = {  # panel -> what is changed from {lr 0.5, batches 1, cohort 20}
    "step": [{"lr": 1.0}, {"lr": 0.5}, {"lr": 0.25}],
    "batches": [{"batches": 1}, {"batches": 2}, {"batches": None}],
    "cohort": [{"cohort": 20}, {"cohort": 50}, {"cohort": 100}],
}
BASE = {"lr": 0.5, "batches": 1, "cohort": 20}
DIAGONAL = {"curvature": "diagonal", "matrix": "fisher"}
FORMS: dict[str, dict[str, Any]] = {  # every client, all batches, lr 1 and damping 0 unless it says otherwise
    "product, Gauss-Newton": {},
    "product, Gauss-Newton, at next": {"curvature_at": "next"},
    "product, Gauss-Newton, at next, lr 0.5": {"curvature_at": "next", "lr": 0.5},
    "product, Gauss-Newton, at next, first step 0.1": {"curvature_at": "next", "first_step": 0.1},
    "product, Fisher": {"matrix": "fisher"},
    "product, Fisher, lr 0.1": {"matrix": "fisher", "lr": 0.1},
    "diagonal Fisher": DIAGONAL,
    "diagonal Fisher, lr 0.1": DIAGONAL | {"lr": 0.1},
    "diagonal Fisher, damping 1": DIAGONAL | {"damping": 1.0},
}


def objective() -> Objective:
    return Objective(fedge.models.logistic(64, 10, seed=0).double(), L2)


def gaps(f: Objective, best: float, kind: str, rounds: int, cohort: int | None = None, **options: Any) -> list[float]:
    """f(w_t) - f* for t = 0 to `rounds`."""
    options = {"model": f.model, "weight_decay": L2, "damping": 0.0, **options}
    curve = watched(kind, rounds, cohort, lambda params: float(f(params)) - best, **options)
    return [float(f(f.start())) - best, *curve]


def rate(curve: list[float], begin: int, end: int) -> float:
    """The factor per round of the exponential that fits best between two rounds."""
    slope = np.polyfit(np.arange(begin, end), np.log(curve[begin:end]), 1)[0]
    return float(np.exp(slope))


def first_below(curve: list[float], level: float) -> int | None:
    return next((t for t, gap in enumerate(curve) if gap < level), None)


def noisy(f: Objective, best: float, kind: str, setting: dict[str, Any]) -> dict[str, Any]:
    """One run with random cohorts or batches: its curve, its two rates and its neighbourhood."""
    curve = gaps(f, best, kind, ROUNDS, **setting)
    plateau = median(curve[-LAST:])
    settled = max(first_below(curve, 2 * plateau) or ROUNDS, 30)
    rates = {"early_rate": rate(curve, 0, 20), "late_rate": rate(curve, 20, settled), "settled": settled}
    return {"partition": kind, **setting, "plateau": plateau, **rates, "curve": digits(curve[::EVERY])}


def noise(f: Objective, best: float) -> list[dict[str, Any]]:
    """Every setting of the three panels once, on both partitions."""
    settings = [BASE | change for panel in NOISE.values() for change in panel]
    distinct = [setting for i, setting in enumerate(settings) if setting not in settings[:i]]
    return [noisy(f, best, kind, setting) for kind in PARTITIONS for setting in distinct]


def exact(f: Objective, best: float, kind: str) -> dict[str, Any]:
    """Every client in the cohort and all batches, lr 1: no noise is left."""
    curve = gaps(f, best, kind, EXACT_ROUNDS)
    until = first_below(curve, 1e-8)
    line = rate(curve, 10, until or EXACT_ROUNDS)
    return {"partition": kind, "rate": line, "rounds_to_1e-8": until, "smallest": min(curve), "curve": digits(curve)}


def form(f: Objective, best: float, name: str) -> dict[str, Any]:
    curve = gaps(f, best, "non-IID-2", FORM_ROUNDS, **FORMS[name])
    until = first_below(curve, TOLERANCE)
    return {"form": name, "rounds_to_1e-6": until, "largest": max(curve), "last": curve[-1], "curve": digits(curve)}


def race(f: Objective, best: float) -> dict[str, Any]:
    """One client with all the data, full batches: rounds to f - f* < 1e-6."""
    step, rounds = best_step(f, best + TOLERANCE)
    slow = [value - best for value in descend(f, best + TOLERANCE, step, rounds)]
    fast = gaps(f, best, "one client", 100)
    ours = first_below(fast, TOLERANCE)
    assert ours is not None
    curves = {"gradient_descent": digits(slow[::EVERY]), "fisher_lbfgs": digits(fast[: ours + 1])}
    return {"step": step, "gradient_descent": rounds, "fisher_lbfgs": ours, "ratio": rounds / ours, "curves": curves}


def main() -> None:
    f = objective()
    optimum = minimum(f)
    best = optimum["value"]
    config = {"l2": L2, "clients": 100, "rounds": ROUNDS, "last": LAST, "every": EVERY, "seed": 0, "batch_size": 5}
    config |= {"form_rounds": FORM_ROUNDS, "exact_rounds": EXACT_ROUNDS, "memory": 10, "tolerance": TOLERANCE}
    result: dict[str, Any] = {"config": config, "optimum": optimum, "race": race(f, best)}
    result["exact"] = [exact(f, best, kind) for kind in PARTITIONS]
    result["forms"] = [form(f, best, name) for name in FORMS]
    result["noise"] = noise(f, best)
    save("convex", result)
    save_picture("convex", draw_noise(result, NOISE, BASE, PARTITIONS))
    save_picture("forms", draw_forms(result))
