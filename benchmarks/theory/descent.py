"""Gradient descent with a constant step, in plain torch, and the search for its best step."""

from __future__ import annotations

import math

from torch.func import grad_and_value

from fedge import tree

from .problem import Objective


def descend(f: Objective, target: float, step: float, limit: int) -> list[float]:
    """f(w_t) for t = 0, 1, ... until it is below the target, has blown up, or `limit` rounds were done."""
    params, values = f.start(), []
    for _ in range(limit + 1):
        gradient, value = grad_and_value(f)(params)
        values.append(float(value))
        if not target <= values[-1] < 1e3:
            break
        params = tree.axpy(-step, gradient, params)
    return values


def rounds_to(f: Objective, target: float, step: float, limit: int) -> float:
    """Rounds until f is below the target, infinite if it is not within the limit."""
    values = descend(f, target, step, limit)
    return len(values) - 1 if values[-1] < target else math.inf


def best_step(f: Objective, target: float, largest: float = 9.0, limit: int = 1500) -> tuple[float, int]:
    """(step, rounds) of the fastest constant step: a grid of factor 1.5, then ever finer around the best.

    The best lies just below the edge of stability, 2 / L; a step beyond it never arrives.
    """
    tried: dict[float, int | float] = {}
    factor, steps = 1.5, [largest / 1.5**i for i in range(6)]
    for _ in range(5):
        for step in steps:
            tried.setdefault(step, rounds_to(f, target, step, int(min([limit, *tried.values()]))))
        best = min(tried, key=lambda step: tried[step])
        factor **= 1 / 3
        steps = [best * factor**i for i in (-1, 1, 2)]
    return best, int(tried[best])
