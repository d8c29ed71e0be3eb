"""docs/privacy.md: its tables from the results, between markers; the text around them stays."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.privacy.measure import PROBLEMS, lines
from benchmarks.uploads.page import accuracy, filled, table

PAGE = Path(__file__).parents[2] / "docs/privacy.md"


def write() -> None:
    text = PAGE.read_text()
    for problem in PROBLEMS:
        text = filled(text, problem, "python -m benchmarks.privacy", epsilons(problem))
    PAGE.write_text(text)


def found(problem: str, method: str, noise: float | None) -> list[dict[str, Any]]:
    return [line for line in lines() if (line["problem"], line["method"], line["noise"]) == (problem, method, noise)]


def epsilons(problem: str) -> str:
    """One row per noise: what is spent, and what is learned."""
    chosen = PROBLEMS[problem]
    shown = [method for method in chosen.methods if found(problem, method, None)]
    if not shown:
        return "Not run yet.\n"
    rows = [["noise", "epsilon", *(f"{method}, test accuracy, %" for method in shown)]]
    for noise in (None, *chosen.noises):
        some = found(problem, shown[0], noise)
        spent = [line["epsilon"] for line in some if line["epsilon"] is not None]
        name = {None: "not private", 0.0: "0, shortened alone"}.get(noise, f"{noise:g}" if noise else "")
        rows.append(
            [name, f"{mean(spent):.2f}" if spent else "∞", *(accuracy(found(problem, m, noise)) for m in shown)]
        )
    return table(rows)
