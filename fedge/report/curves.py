"""Curves of all runs in one picture: accuracy or loss against rounds, megabytes, seconds or joules.

Runs that differ in their seeds are one line, their mean, with a band of one standard deviation around it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedge.report import style
from fedge.report.groups import Band, Group, band, grouped
from fedge.report.losses import MARK, other_losses
from fedge.report.read import RunFolder
from fedge.report.series import Against, curve, running_mean
from fedge.report.style import Look, looks

Measure = str  # accuracy, loss, or the name of a metric of the user's own
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
Y_LABEL = {"accuracy": "accuracy (%)"}


def accuracy(runs: Sequence[RunFolder], against: Against = "rounds", target: float | None = None) -> Figure:
    """Test accuracy of all runs, in percent; training accuracy thin, where there is one."""
    return _one(runs, "accuracy", against, target)


def loss(runs: Sequence[RunFolder], against: Against = "rounds") -> Figure:
    """Test loss of all runs; training loss thin, where there is one."""
    return _one(runs, "loss", against, None)


def metric(runs: Sequence[RunFolder], name: str) -> Figure:
    """A metric of the user's own on the test set, against rounds; on training data thin, where it was computed."""
    return _one(runs, name, "rounds", None)


def headline(runs: Sequence[RunFolder], target: float | None = None) -> Figure:
    """Accuracy, or loss where no run has one, against rounds and against MB: the picture of a README."""
    figure = style.figure(11.0, 4.0)
    left, right = figure.subplots(1, 2, sharey=True)
    groups = grouped(runs)
    measure = "accuracy" if any(curve(run, "test_accuracy").y for run in runs) else "loss"
    _fill(left, groups, measure, "rounds", None)
    _fill(right, groups, measure, "MB", target if measure == "accuracy" else None)
    right.set_ylabel("")
    _scale(left, measure)
    _legend(figure, groups, measure, train=False)
    return figure


def _one(runs: Sequence[RunFolder], measure: Measure, against: Against, target: float | None) -> Figure:
    figure = style.figure()
    axes = figure.subplots()
    groups = grouped(runs)
    _fill(axes, groups, measure, against, target)
    for at, (group, look) in enumerate(zip(groups, looks(groups), strict=True)):
        _train(axes, _points(group, f"train_{measure}", against), at, look)
    _scale(axes, measure)
    _legend(figure, groups, measure, train=True)
    return figure


def _fill(axes: Axes, groups: Sequence[Group], measure: Measure, against: Against, target: float | None) -> None:
    """One pair of axes with the test curve of every group; the plain ones lie under those with a colour."""
    part = " or ".join(dict.fromkeys(run.judged_on for group in groups for run in group.runs))
    style.dress(axes, X_LABEL[against], f"{part} {Y_LABEL.get(measure, measure)}")
    style.ticks(axes, whole=against == "rounds")
    axes.margins(x=0.02)
    for at, (group, look) in enumerate(zip(groups, looks(groups), strict=True)):
        _test(axes, _points(group, f"test_{measure}", against), at, look)
    if target is not None:
        _mark(axes, target)


def _points(group: Group, key: str, against: Against) -> Band:
    found = band(group.runs, key, against)
    if key not in ("test_accuracy", "train_accuracy"):
        return found
    return Band(found.x, [100 * y for y in found.y], [100 * d for d in found.deviation])


def _test(axes: Axes, points: Band, at: int, look: Look) -> None:
    y = points.y
    if len(y) > NOISY:
        if look.coloured and not any(points.deviation):
            _named(axes.plot(points.x, y, color=look.colour, linewidth=0.7, alpha=0.35, zorder=look.order), at)
        y = running_mean(y)
    if look.coloured and any(points.deviation):
        low, high = (np.array(y) + sign * np.array(points.deviation) for sign in (-1, 1))
        filled = axes.fill_between(points.x, low, high, color=look.colour, alpha=0.15, linewidth=0, zorder=look.order)
        _named([filled], at)
    marker = "o" if len(y) == 1 else ""
    width = THICK if look.coloured else THIN
    drawn = axes.plot(
        points.x,
        y,
        linestyle=look.stroke,
        color=look.colour,
        linewidth=width,
        marker=marker,
        markersize=4,
        zorder=look.order,
    )
    _named(drawn, at)


def _train(axes: Axes, points: Band, at: int, look: Look) -> None:
    if not look.coloured or not points.y:
        return
    y = running_mean(points.y) if len(points.y) > NOISY else points.y
    _named(axes.plot(points.x, y, linestyle=look.stroke, color=look.colour, linewidth=THIN, zorder=look.order), at)


def _named(drawn: Sequence[Artist], at: int) -> None:
    """So that the page finds what belongs to a group: see `svg.inline`."""
    for one in drawn:
        one.set_gid(f"group{at}")


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
    """Losses far apart on a logarithmic axis; no band beyond what the values can be: 0 and 100 %, 0, 0 and 1."""
    low, high = axes.get_ylim()
    if measure == "accuracy":
        axes.set_ylim(max(low, 0), min(high, 100.5))
        return
    lines = [np.asarray(line.get_ydata(), float) for line in axes.get_lines()]
    values = np.concatenate(lines) if lines else np.empty(0)
    if measure == "loss" and values.size and 0 < values.min() < values.max() / LOG_RATIO:
        axes.set_yscale("log")
    elif values.size and values.min() >= 0:
        share = values.max() <= 1 and measure != "loss"
        axes.set_ylim(max(low, -0.02 * (high - low) if values.min() == 0 else 0), min(high, 1.02) if share else high)


def _legend(figure: Figure, groups: Sequence[Group], measure: Measure, train: bool) -> None:
    found = looks(groups)
    marked = other_losses(groups) if measure == "loss" else {}
    named = sorted((at for at, look in enumerate(found) if look.coloured), key=lambda at: -found[at].order)
    handles = [
        Line2D([], [], color=found[at].colour, linestyle=found[at].stroke, linewidth=THICK, gid=f"group{at}")
        for at in named
    ]
    labels = [f"{groups[at].label}{MARK * (at in marked)}" for at in named]
    if len(named) < len(groups):
        handles.append(Line2D([], [], color=style.PLAIN, linewidth=THIN))
        labels.append(f"{len(groups) - len(named)} others")
    if train and any(curve(run, f"train_{measure}").y for group in groups for run in group.runs):
        handles.append(Line2D([], [], color="0.3", linewidth=THIN))
        labels.append("on training data")
    style.legend(figure, handles, labels)
