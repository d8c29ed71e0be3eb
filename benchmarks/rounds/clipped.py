"""FedAvg and FedOVA with clipped gradients: rivals that no grid of the yardstick has, stored for the results page."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from statistics import median

RESULTS = Path(__file__).parents[1] / "paper" / "results" / "results.jsonl"


@cache
def curves(problem: str, label: str) -> list[list[float]]:
    """Test accuracies of every seed, judged at the mean of late rounds."""
    lines = map(json.loads, RESULTS.read_text().splitlines())
    wanted = ("clipped", problem, label)
    return [line["test_accuracy"] for line in lines if (line["experiment"], line["cell"], line["label"]) == wanted]


def rounds_to(problem: str, label: str, goal: float) -> float:
    """The median of the seeds; one that never got there counts as the worst."""
    found = ([at for at, value in enumerate(curve, 1) if value >= goal] for curve in curves(problem, label))
    return median(there[0] if there else float("inf") for there in found)
