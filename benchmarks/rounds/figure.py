"""Test accuracy against rounds and against MB, the median of the seeds, on log axes: a factor is a distance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .findings import Findings
from .store import Line

PANELS = {
    "fmnist-iid": ("Fashion-MNIST, all labels at every client", (80.0, 92.5)),
    "fmnist-l2": ("Fashion-MNIST, two labels per client", (55.0, 91.5)),
}
COLOURS = {
    "FedAvg-SGD": "#000000",
    "FedAvgM": "#56B4E9",
    "FedCM": "#0072B2",
    "Long-step FedAvg": "#CC79A7",
    "Server spectral": "#009E73",
    "Spectral carried": "#D55E00",
    "FedAvg": "#999999",
    "FedOVA": "#000000",
    "FedOVA + FedCM": "#0072B2",
    "FedAvg + server spectral": "#009E73",
    "FedOVA + server spectral": "#D55E00",
}
LEVEL = 0.35  # of a panel's height from above: where the order of the names is read off
GAP = 0.065  # of a panel's height, between names


def draw(found: Findings, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 7.6), layout="constrained")
    for row, (problem, (title, limits)) in zip(figure.subplots(2, 2), PANELS.items(), strict=True):
        for axes, against in zip(row, ("rounds", "MB"), strict=True):
            panel(axes, found.runs(problem), against, limits)
            axes.set_title(f"{title}: against {against}", fontsize=10.5, loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def panel(axes: Any, runs: dict[str, list[Line]], against: str, limits: tuple[float, float]) -> None:
    shown = {name: lines for name, lines in runs.items() if name in COLOURS}
    reached, right = {}, 0.0
    for name, lines in shown.items():
        curve = 100 * np.median([line["accuracy"] for line in lines], axis=0)
        at = np.arange(1, len(curve) + 1) * (1.0 if against == "rounds" else per_round(lines))
        axes.plot(at, curve, color=COLOURS[name], linewidth=1.8)
        reached[name] = at[np.argmax(curve >= limits[1] - LEVEL * (limits[1] - limits[0]))]
        right = max(right, at[-1])
    axes.set_xscale("log")
    axes.set(ylim=limits, ylabel="test accuracy, %", xlabel="round" if against == "rounds" else "MB, up and down")
    axes.set_xlim(1 if against == "rounds" else min(per_round(lines) for lines in shown.values()), right)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    label(axes, reached)


def per_round(lines: list[Line]) -> float:
    spent = lines[0]["spent"]
    moved: float = (spent["up"] + spent["down"]) / len(lines[0]["accuracy"]) / 1e6
    return moved


def label(axes: Any, reached: dict[str, float]) -> None:
    """Names in their curves' colours, in the order in which the curves come from left to right."""
    for place, name in enumerate(sorted(reached, key=lambda name: -reached[name])):
        style: dict[str, Any] = {"color": COLOURS[name], "ha": "right", "fontsize": 9.5, "fontweight": "bold"}
        axes.text(0.97, 0.06 + GAP * place, name, transform=axes.transAxes, **style)
