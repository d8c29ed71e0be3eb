"""Curves of all runs in one picture: accuracy or loss against rounds, megabytes, seconds or joules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedge.report import style
from fedge.report.read import RunFolder
from fedge.report.series import Against, Curve, curve, running_mean

Measure = Literal["accuracy", "loss"]
NOISY = 60  # points; a longer curve is drawn thin, under its running mean
THICK, THIN = 1.8, 0.8  # points
LOG_RATIO = 50.0  # largest loss over smallest, from which a linear axis shows one of them only
X_LABEL: dict[Against, str] = {
    "rounds": "round",
    "MB": "communication, up and down (MB)",
    "seconds": "training time (s)",
    "virtual_seconds": "time on the devices (s)",
    "joules": "energy of all devices (J)",
}
Y_LABEL: dict[Measure, str] = {"accuracy": "accuracy (%)", "loss": "loss"}


def accuracy(runs: Sequence[RunFolder], against: Against = "rounds", target: float | None = None) -> Figure:
    """Test accuracy of all runs, in percent; training accuracy thin, where there is one."""
    return _one(runs, "accuracy", against, target)


def loss(runs: Sequence[RunFolder], against: Against = "rounds") -> Figure:
    """Test loss of all runs; training loss thin, where there is one."""
    return _one(runs, "loss", against, None)


def headline(runs: Sequence[RunFolder], target: float | None = None) -> Figure:
    """Accuracy against rounds on the left and against MB on the right: the picture of a README."""
    figure = style.figure(11.0, 4.0)
    left, right = figure.subplots(1, 2, sharey=True)
    _fill(left, runs, "accuracy", "rounds", None)
    _fill(right, runs, "accuracy", "MB", target)
    right.set_ylabel("")
    _scale(left, "accuracy")
    _legend(figure, runs, "accuracy", train=False)
    return figure


def _one(runs: Sequence[RunFolder], measure: Measure, against: Against, target: float | None) -> Figure:
    figure = style.figure()
    axes = figure.subplots()
    _fill(axes, runs, measure, against, target)
    for at, run in enumerate(runs):
        _train(axes, _points(run, f"train_{measure}", against), at)
    _scale(axes, measure)
    _legend(figure, runs, measure, train=True)
    return figure


def _fill(axes: Axes, runs: Sequence[RunFolder], measure: Measure, against: Against, target: float | None) -> None:
    """One pair of axes with the test curve of every run."""
    part = " or ".join(dict.fromkeys(run.judged_on for run in runs))
    style.dress(axes, X_LABEL[against], f"{part} {Y_LABEL[measure]}")
    style.ticks(axes, whole=against == "rounds")
    axes.margins(x=0.02)
    for at, run in enumerate(runs):
        _test(axes, _points(run, f"test_{measure}", against), at)
    if target is not None:
        _mark(axes, target)


def _points(run: RunFolder, key: str, against: Against) -> Curve:
    found = curve(run, key, against)
    return Curve(found.x, [100 * y for y in found.y]) if key.endswith("accuracy") else found


def _test(axes: Axes, points: Curve, at: int) -> None:
    colour, stroke, y = style.colour(at), style.stroke(at), points.y
    if len(y) > NOISY:
        axes.plot(points.x, y, color=colour, linewidth=0.7, alpha=0.35)
        y = running_mean(y)
    marker = "o" if len(y) == 1 else ""
    axes.plot(points.x, y, linestyle=stroke, color=colour, linewidth=THICK, marker=marker, markersize=4)


def _train(axes: Axes, points: Curve, at: int) -> None:
    y = running_mean(points.y) if len(points.y) > NOISY else points.y
    axes.plot(points.x, y, linestyle=style.stroke(at), color=style.colour(at), linewidth=THIN)


def _mark(axes: Axes, target: float) -> None:
    """A line at the target, named outside the axes, where there is no data to cover."""
    axes.axhline(100 * target, color="0.45", linewidth=0.9, linestyle=(0, (1, 2)))
    axes.annotate(
        f"{100 * target:.4g} %",
        (1, 100 * target),
        xycoords=("axes fraction", "data"),
        xytext=(3, 0),
        textcoords="offset points",
        verticalalignment="center",
        fontsize=style.SMALL,
        color="0.35",
    )


def _scale(axes: Axes, measure: Measure) -> None:
    """Losses far apart on a logarithmic axis; accuracies never beyond 0 and 100 %."""
    if measure == "accuracy":
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, 0), min(high, 100.5))
        return
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.get_lines()])
    if values.size and 0 < values.min() < values.max() / LOG_RATIO:
        axes.set_yscale("log")


def _legend(figure: Figure, runs: Sequence[RunFolder], measure: Measure, train: bool) -> None:
    handles = [
        Line2D([], [], color=style.colour(at), linestyle=style.stroke(at), linewidth=THICK) for at in range(len(runs))
    ]
    labels = [run.label for run in runs]
    if train and any(curve(run, f"train_{measure}").y for run in runs):
        handles.append(Line2D([], [], color="0.3", linewidth=THIN))
        labels.append("on training data")
    style.legend(figure, handles, labels)
