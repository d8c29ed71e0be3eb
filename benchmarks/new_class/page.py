"""docs/new-class.md and its picture, from the stored runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.readme import replaced

from .measure import BEFORE, METHODS, Line

RESULTS = Path(__file__).parent / "results.jsonl"
PAGE = Path(__file__).parents[2] / "docs" / "new-class.md"
PICTURE = PAGE.parent / "images" / "new-class.png"
TARGETS, LAST = (0.5, 0.8), 5


def lines() -> list[Line]:
    return [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()]


def rounds_to(line: Line, target: float) -> float:
    """Rounds after the class appeared until its accuracy is at the target; infinite if it never is."""
    later = line["new"][BEFORE:]
    return next((float(at) for at, value in enumerate(later, 1) if value >= target), float("inf"))


def table(stored: Sequence[Line]) -> str:
    head = ["method", "old classes before, %", "old classes 5 rounds after, %", "old classes at the end, %"]
    head += ["new class at the end, %", *(f"rounds to {100 * one:g} % of the new class" for one in TARGETS)]
    rows = [[*head, "MB per round after"], ["---"] * (len(head) + 1)]
    for name in METHODS:
        mine = [line for line in stored if line["method"] == name]
        parts = [
            ("old", BEFORE - LAST, BEFORE),
            ("old", BEFORE, BEFORE + LAST),
            ("old", -LAST, None),
            ("new", -LAST, None),
        ]
        cells = [f"{100 * mean(mean(line[part][a:b]) for line in mine):.1f}" for part, a, b in parts]
        cells += [_median([rounds_to(line, target) for line in mine]) for target in TARGETS]
        rows.append([name, *cells, f"{mean(mean(line['bytes'][BEFORE:]) for line in mine) / 1e6:.2f}"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _median(values: Sequence[float]) -> str:
    """The middle one, and every seed."""
    each = ", ".join("–" if one == float("inf") else f"{one:g}" for one in values)
    middle = median(values)
    return f"**{'–' if middle == float('inf') else f'{middle:g}'}** ({each})"


def draw(stored: Sequence[Line], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    both = figure.subplots(1, 2, sharey=True)
    for axes, part, title in zip(both, ("old", "new"), ("the nine old classes", "the class that appears"), strict=True):
        for name in METHODS:
            _curve(axes, name, [line[part] for line in stored if line["method"] == name])
        axes.axvline(BEFORE + 0.5, color="grey", linewidth=1, linestyle=":")
        axes.set(title=title, xlabel="round", ylim=(0, 100))
        axes.grid(alpha=0.3)
    both[0].set_ylabel("test accuracy, %")
    both[1].legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _curve(axes: Any, name: str, series: Sequence[Sequence[float]]) -> None:
    middle = [100 * mean(values) for values in zip(*series, strict=True)]
    axes.plot(range(1, len(middle) + 1), middle, label=name, linewidth=1.4)


def text(page: str, stored: Sequence[Line]) -> str:
    return replaced(page, "table", table(stored) + "\n", "python -m benchmarks.new_class", PAGE.name)


def write() -> None:
    draw(lines(), PICTURE)
    PAGE.write_text(text(PAGE.read_text("utf-8"), lines()), "utf-8")
