"""The pictures, drawn from the stored numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedge.report.style import SMALL, TEXT, colour, dress, figure

FLOOR = 1e-15  # rounding: below it a gap has no meaning
GAP = "$f(w_t) - f^*$"


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], label: str, at: int, **style: Any) -> None:
    axes.semilogy(x, np.maximum(y, FLOOR), label=label, color=colour(at), linewidth=1.3, **style)


def _every(curve: Sequence[float], step: int) -> list[int]:
    return [step * i for i in range(len(curve))]


def _label(setting: dict[str, Any], panel: str) -> str:
    batches = setting["batches"]
    return {
        "step": f"step {setting['lr']:g}",
        "batches": f"{batches or 'all'} batch{'' if batches == 1 else 'es'}",
        "cohort": f"cohort {setting['cohort']} of 100",
    }[panel]


def draw_noise(result: dict[str, Any], panels: dict[str, Any], base: dict[str, Any], kinds: Sequence[str]) -> Figure:
    """Rows: partitions. Columns: what is changed. The grey line is the run without noise."""
    picture = figure(10.5, 6.0)
    grid = picture.subplots(len(kinds), len(panels), sharex=True, sharey=True)
    every = result["config"]["every"]
    for axes_row, kind in zip(grid, kinds, strict=True):
        for axes, (panel, changes) in zip(axes_row, panels.items(), strict=True):
            silent = next(run["curve"] for run in result["exact"] if run["partition"] == kind)
            _line(axes, range(len(silent)), silent, "every client, all batches, step 1", 7, linestyle="--")
            for at, change in enumerate(changes):
                wanted = {"partition": kind, **base, **change}
                run = next(r for r in result["noise"] if wanted.items() <= r.items())
                _line(axes, _every(run["curve"], every), run["curve"], _label(wanted, panel), at)
            dress(axes, "round" if kind == kinds[-1] else "", f"{kind}:  {GAP}" if panel == "step" else "")
            axes.set_ylim(2e-6, 5)
            axes.legend(fontsize=SMALL, frameon=False, loc="lower right")
    titles = ("step (1 batch, cohort 20)", "batches of 5 (step 0.5, cohort 20)", "cohort (step 0.5, 1 batch)")
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title, fontsize=TEXT)
    return picture


def draw_forms(result: dict[str, Any]) -> Figure:
    """Left: the forms of the curvature without noise. Right: the race against gradient descent."""
    picture = figure(10.5, 4.4)
    left, right = picture.subplots(1, 2)
    for at, run in enumerate(result["forms"]):
        style = "-" if run["rounds_to_1e-6"] is not None else ":"
        _line(left, range(len(run["curve"])), run["curve"], run["form"], at % 8, linestyle="-." if at > 7 else style)
    left.set_title("every client, all batches, non-IID-2", fontsize=TEXT)
    left.set_ylim(FLOOR, 1e5)
    left.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2)
    race, every = result["race"], result["config"]["every"]
    slow, fast = race["curves"]["gradient_descent"], race["curves"]["fisher_lbfgs"]
    _line(right, _every(slow, every), slow, f"gradient descent, best step {race['step']:.3g}", 1)
    _line(right, range(len(fast)), fast, "FisherLBFGS, product, Gauss-Newton", 0)
    right.axhline(result["config"]["tolerance"], color="0.6", linewidth=0.8)
    right.set_title("one client, full batches", fontsize=TEXT)
    right.legend(fontsize=SMALL, frameon=False, loc="upper right")
    dress(left, "round", GAP)
    dress(right, "round", GAP)
    return picture


def draw_nonconvex(result: dict[str, Any], kinds: Sequence[str]) -> Figure:
    picture = figure(9.0, 3.9)
    for axes, kind in zip(picture.subplots(1, len(kinds), sharey=True), kinds, strict=True):
        for at, run in enumerate(r for r in result["runs"] if r["partition"] == kind):
            _line(axes, _every(run["curve"], result["config"]["every"]), run["curve"], f"step {run['step']:g}", at)
        dress(axes, "rounds T", r"mean of $|\nabla f(w_t)|^2$, t < T" if kind == kinds[0] else "")
        axes.set_title(kind, fontsize=TEXT)
        axes.legend(fontsize=SMALL, frameon=False)
    return picture


def draw_bytes(result: dict[str, Any]) -> Figure:
    """Left: the sum over all links, the same on star and tree. Right: the longest path."""
    picture = figure(10.0, 4.4)
    total, path = picture.subplots(1, 2, sharey=True)
    for at, name in enumerate(dict.fromkeys(row["algorithm"] for row in result["rows"])):
        rows = [row for row in result["rows"] if row["algorithm"] == name]
        taus = [row["tau"] for row in rows]
        if name.endswith("next"):
            continue  # the same bytes as the product, in one phase
        style = {"color": colour(at), "linewidth": 1.3, "markersize": 5}
        total.loglog(taus, [row["ledger"] for row in rows], "o", label=f"{name}: ledger (star)", **style)
        total.loglog(taus, [row["tree_total"] for row in rows], "-", label=f"{name}: tree", **style)
        path.loglog(taus, [row["star_path"] for row in rows], "o--", label=f"{name}: star", **style)
        path.loglog(taus, [row["tree_path"] for row in rows], "s-", label=f"{name}: tree", **style)
    dress(total, "clients per round, τ", "bytes per round")
    dress(path, "clients per round, τ", "")
    total.set_title("total over all links", fontsize=TEXT)
    path.set_title("longest path", fontsize=TEXT)
    for axes in (total, path):
        axes.legend(fontsize=8, frameon=False)
    return picture
