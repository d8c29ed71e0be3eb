"""GIANT and DONE on the convex problem: f(w_t) - f* against rounds, for one client and for many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fedge
from fedge.core import Params

from .convex import L2, first_below, objective
from .problem import DIGITS, Objective, federation, minimum
from .store import digits, save

LENGTHS = (0.03, 0.1, 0.3, 1.0)
RUNS: tuple[tuple[str, str, dict[str, Any], int], ...] = (  # algorithm, clients, settings, rounds
    ("GIANT", "one client", {"iterations": 50, "candidates": ()}, 15),
    ("GIANT", "10 clients, IID", {"iterations": 50, "candidates": ()}, 15),
    ("GIANT", "10 clients, IID", {"iterations": 50, "candidates": LENGTHS}, 30),
    ("GIANT", "100 clients, IID", {"iterations": 50, "candidates": LENGTHS}, 60),
    ("GIANT", "100 clients, non-IID-2", {"iterations": 50, "candidates": LENGTHS}, 60),
    ("DONE", "one client", {"alpha": 0.3, "iterations": 50, "candidates": ()}, 60),
    ("DONE", "10 clients, IID", {"alpha": 0.3, "iterations": 50, "candidates": LENGTHS}, 60),
    ("DONE", "100 clients, IID", {"alpha": 0.3, "iterations": 50, "candidates": LENGTHS}, 60),
)


@dataclass(frozen=True, eq=False)
class WatchedGIANT(fedge.GIANT):
    """GIANT with one more number in the record of every round, computed over all data and sent nowhere."""

    watch: Callable[[Params], float] = lambda params: float("nan")

    def notes(self, state: Any) -> dict[str, Any]:
        return {"watched": self.watch(state["params"])}


@dataclass(frozen=True, eq=False)
class WatchedDONE(fedge.DONE):
    """The same for DONE."""

    watch: Callable[[Params], float] = lambda params: float("nan")

    def notes(self, state: Any) -> dict[str, Any]:
        return {"watched": self.watch(state["params"])}


KINDS: dict[str, Any] = {"GIANT": WatchedGIANT, "DONE": WatchedDONE}


def clients(name: str) -> fedge.Federation:
    if name.startswith("10 "):
        return fedge.Federation(DIGITS, fedge.partition.iid(DIGITS.train_y, 10, seed=0))
    return federation(name.removeprefix("100 clients, "))


def gaps(f: Objective, best: float, algorithm: str, where: str, rounds: int, **options: Any) -> list[float]:
    """f(w_t) - f* for t = 0 to `rounds`; shorter if it diverges."""
    watched = KINDS[algorithm](
        f.model, weight_decay=L2, damping=0.0, watch=lambda params: float(f(params)) - best, **options
    )
    curve = [float(f(f.start())) - best]
    observe = fedge.Observe(evaluate_every=rounds)
    fedge.train(
        watched,
        clients(where),
        rounds=rounds,
        observe=observe,
        on_round=lambda record: curve.append(record["watched"]),
    )
    return curve


def main() -> None:
    f = objective()
    best = minimum(f)["value"]
    runs = []
    for algorithm, where, options, rounds in RUNS:
        curve = gaps(f, best, algorithm, where, rounds, **options)
        found = {f"rounds_to_{level:g}": first_below(curve, level) for level in (1e-3, 1e-6)}
        named = {"algorithm": algorithm, "clients": where, **options, "rounds": rounds}
        runs.append(named | found | {"last": curve[-1], "curve": digits(curve)})
    save("newton", {"runs": runs})
