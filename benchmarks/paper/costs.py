"""Accuracy against bytes and against local work, from the stored curves."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from fedge.sweep.entries import innermost
from fedge.sweep.store import Line

from .tables import Cell, first, spread

EXAMPLES = {"fashion_mnist": 60_000, "cifar10": 50_000, "speech_commands": 20_000}
EXTRA = {"feddane": 1, "fisher_lbfgs": 1}  # passes for the gradient at the broadcast point, or for its squares
CLASSES = 10
LATE = 5  # rounds whose mean is the accuracy at a budget: few, because curves still rise there


def per_round(line: Line) -> float:
    """Bytes of one round, both ways."""
    return float((line["up_bytes"] + line["down_bytes"] - line["setup_bytes"]) / line["rounds"])


def total(line: Line) -> float:
    return float(line["up_bytes"] + line["down_bytes"])


def at_bytes(line: Line, budget: float) -> float | None:
    """The mean accuracy of the last rounds that a budget of bytes pays for; None if it pays for none.

    >>> half = {"up_bytes": 40, "down_bytes": 40, "setup_bytes": 0, "rounds": 4, "test_accuracy": [0.1, 0.3, 0.5, 0.7]}
    >>> at_bytes(half, 40)
    0.2
    """
    paid = int((budget - line["setup_bytes"]) / per_round(line) + 1e-9)
    rounds = max(0, min(paid, len(line["test_accuracy"])))
    seen = [value for value in line["test_accuracy"][max(0, rounds - LATE) : rounds] if value is not None]
    return mean(seen) if seen else None


def gradients(config: dict[str, Any]) -> float | None:
    """Gradients of single examples that the cohort computes per round: passes over its examples, by binary model.

    None if clients hold different numbers of labels.
    """
    algorithm, partition = config["algorithm"], config["partition"]
    inner, shared, rows = innermost(algorithm), 0.0, 1
    while isinstance(algorithm, dict):
        shared = max(shared, _shared(algorithm, partition) if algorithm["name"] == "data_sharing" else 0.0)
        rows = partition.get("labels", CLASSES) if algorithm["name"] == "fedova" else rows
        algorithm = algorithm.get("inner")
    if partition["kind"] not in ("iid", "labels_per_client"):
        return None
    examples = EXAMPLES[config["data"]["name"]] * config["train"]["cohort"] / partition["clients"]
    product = 1 if inner.get("curvature") == "product" else 0  # counts as two passes
    return float(examples * (1 + shared) * rows * (inner["epochs"] + EXTRA.get(inner["name"], 0) + product))


def _shared(algorithm: dict[str, Any], partition: dict[str, Any]) -> float:
    """The examples that a client is given, as a share of its own."""
    times = partition.get("clients", 0) if algorithm.get("of") == "all" else 1
    return float(algorithm["beta"] * algorithm.get("portion", 1.0) * times)


class Costs:
    """What a cell costs, beside a base: the FedAvg of the same cell."""

    def __init__(self, cell: Cell, base: Cell | None) -> None:
        self.cell, self.base = cell, base
        self.lines: list[Line] = cell.good if cell.lines else cell.earlier

    @property
    def budget(self) -> float | None:
        """Bytes that the base spends in its run."""
        lines = self.base.good if self.base is not None else []
        return mean(map(total, lines)) if lines else None

    def equal(self) -> float | None:
        """Accuracy at the base's bytes, in %, the mean over the seeds."""
        values = self.equal_values()
        return 100 * mean(values) if values else None

    def equal_values(self) -> list[float]:
        if self.budget is None:
            return []
        return [value for line in self.lines if (value := at_bytes(line, self.budget)) is not None]

    def equal_text(self) -> str:
        values = [100 * value for value in self.equal_values()]
        return spread(values, 1) if values else "–"

    def reached(self, target: float) -> list[int] | None:
        """The first rounds at the target, seed by seed; None if a seed never is."""
        found = [first(line["test_accuracy"], target / 100) for line in self.lines]
        return [one for one in found if one is not None] if found and None not in found else None

    def bytes_to(self, target: float) -> float | None:
        """Bytes until the target, with those before the first round: the mean of the seeds."""
        rounds = self.reached(target)
        return None if rounds is None else mean(_spent(self.lines, rounds))

    def gradients_to(self, target: float) -> float | None:
        rounds, each = self.reached(target), gradients(self.cell.entry.config)
        return None if rounds is None or each is None else mean(rounds) * each


def _spent(lines: Sequence[Line], rounds: Sequence[int]) -> list[float]:
    return [line["setup_bytes"] + number * per_round(line) for line, number in zip(lines, rounds, strict=True)]


def shown(value: float | None, unit: float = 1e6, places: int = 0) -> str:
    """Millions of bytes or gradients; a dash if the target was not reached.

    >>> shown(1_234_500_000), shown(None)
    ('1,234', '–')
    """
    return "–" if value is None else f"{value / unit:,.{places}f}"
