"""Heat maps: which client holds how many examples of a class, and which run knows which class."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from fedge.report import style
from fedge.report.errors import ReportError
from fedge.report.groups import Group, grouped, spread
from fedge.report.read import RunFolder
from fedge.report.series import last

STRIP = 250  # clients in one row of the picture; more would be thinner than a line
NUMBERS = 240  # cells; with more, a number in each would be too small to read
TICKS = 20  # class labels across the figure
FEW_ROWS = 16  # runs; with more, rows are narrower
DARK, LIGHT = "#010101", "#fefefe"  # on a cell, whatever the page's own colours are
TALLEST = 9.0  # inches of all strips together


def partition_figure(counts: Sequence[Sequence[int]], names: Sequence[str] = (), total: int | None = None) -> Figure:
    """Clients across, classes down, examples as colour; white is none.

    counts: [clients, classes]; names: of the classes, or empty; total: the number of clients when
    `counts` holds the first of them only. More than 250 clients wrap into several strips.
    """
    table = _table(counts)
    clients, classes = table.shape
    strips = math.ceil(clients / STRIP)
    width = math.ceil(clients / strips)
    tall = min(max(0.16 * classes, 2.3 / strips, 1.3), TALLEST / strips)
    figure = style.figure(style.SIZE[0], strips * tall + 0.9)
    rows = list(figure.subplots(strips, 1, squeeze=False)[:, 0])
    for at, axes in enumerate(rows):
        image = _strip(axes, table, at * width, width)
        _class_ticks(axes, "y", classes, names, int(tall / 0.15))
    shown = f" (first {clients:,} of {total:,})" if total is not None and total > clients else ""
    rows[-1].set_xlabel(f"client{shown}", fontsize=style.TEXT)
    figure.supylabel("class", fontsize=style.TEXT)
    _colour_bar(figure, image, rows, "examples")
    return figure


def class_accuracy(runs: Sequence[RunFolder]) -> Figure:
    """Runs down, classes across: test accuracy by class at the last evaluated round, in percent.

    Runs that differ in their seeds are one row, their mean.
    """
    found = [(group.label, values) for group in grouped(runs) if (values := _by_class(group))]
    classes = max(len(values) for _, values in found)
    table = np.full((len(found), classes), np.nan)
    for row, (_, values) in enumerate(found):
        table[row, : len(values)] = [math.nan if v is None else 100 * v for v in values]
    figure = style.figure(style.SIZE[0], 1.5 + (0.36 if len(found) <= FEW_ROWS else 0.22) * len(found))
    axes = figure.subplots()
    image = _image(axes, table, _ten_below(table), 100)
    _write_numbers(axes, image, table)
    _class_ticks(axes, "x", classes, _names(runs), TICKS)
    axes.set_yticks(range(len(found)), [_wrapped(label) for label, _ in found])
    axes.set_xlabel("class", fontsize=style.TEXT)
    _colour_bar(figure, image, [axes], "accuracy (%)")
    return figure


def _by_class(group: Group) -> list[float | None]:
    """The mean over the runs of a group; a class without examples is None."""
    values = [found for run in group.runs if (found := last(run, "test_class_accuracy"))]
    means = [spread(one) for one in zip_longest(*values)]
    return [None if mean is None else mean.mean for mean in means]


def _ten_below(table: Any) -> float:
    """The lowest percentage rounded down to a ten: a scale from 0 would show good runs in one colour."""
    low = float(np.nanmin(table)) if not np.isnan(table).all() else 0.0
    return min(10.0 * math.floor(low / 10), 90.0)


def _table(counts: Sequence[Sequence[int]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    widths = {len(row) for row in counts}
    if len(widths) != 1 or widths == {0}:
        raise ReportError(
            f"counts holds {len(counts)} clients with {sorted(widths)} classes: "
            "expected at least one client, and the same number of classes (1 or more) for each"
        )
    return np.array(counts, dtype=np.float64)


def _strip(axes: Axes, table: Any, start: int, width: int) -> AxesImage:
    """Clients start to start + width, on an axis that carries their numbers."""
    part = table[start : start + width].T
    part = np.where(part > 0, part, np.nan)
    image = _image(axes, part, 1, max(table.max(), 2))
    image.set_extent((start - 0.5, start + part.shape[1] - 0.5, len(part) - 0.5, -0.5))
    axes.set_xlim(start - 0.5, start + width - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    axes.set_yticks(np.arange(1, len(part)) - 0.5, minor=True)
    axes.grid(which="minor", axis="y", color="0.88", linewidth=0.6 if len(part) <= 40 else 0)
    _write_numbers(axes, image, part)
    return image


def _image(axes: Axes, table: Any, low: float, high: float) -> AxesImage:
    image = axes.imshow(table, cmap=_colours(), vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    axes.tick_params(labelsize=style.SMALL, color="0.6")
    axes.tick_params(which="minor", length=0)
    axes.spines[:].set_color("0.6")
    return image


def _colours() -> Colormap:
    """ColorBrewer's YlGnBu without its palest part, which looks like none at all, and its darkest."""
    return ListedColormap(colormaps["YlGnBu"](np.linspace(0.15, 0.9, 256)))


def _write_numbers(axes: Axes, image: AxesImage, table: Any) -> None:
    """The value in every cell, dark on light and light on dark, when there is room."""
    if table.size > NUMBERS or table.shape[1] > TICKS:
        return
    for (row, column), value in np.ndenumerate(table):
        if np.isnan(value):
            continue
        red, green, blue, _ = image.cmap(image.norm(value))
        ink = DARK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else LIGHT
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=style.SMALL)


def _class_ticks(axes: Axes, axis: str, classes: int, names: Sequence[str], most: int) -> None:
    """Names, or numbers, of every class or of every so many."""
    every = range(0, classes, math.ceil(classes / most))
    labels = [_short(names[c]) if c < len(names) else str(c) for c in every]
    if axis == "y":
        axes.set_yticks(list(every), labels)
        return
    long = sum(map(len, labels)) > 40
    axes.set_xticks(list(every), labels, rotation=40 if long else 0, ha="right" if long else "center")


def _short(text: object, limit: int = 28) -> str:
    line = style.plain(text)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _wrapped(label: str, limit: int = 28) -> str:
    """A label of several lines, never cut: its end is what tells it from the others."""
    return "\n".join(textwrap.wrap(style.plain(label), limit)) or " "


def _names(runs: Sequence[RunFolder]) -> Sequence[str]:
    return next((names for run in runs if (names := run.clients.get("names"))), ())


def _colour_bar(figure: Figure, image: AxesImage, rows: Sequence[Axes], text: str) -> None:
    bar = figure.colorbar(image, ax=rows, pad=0.02, fraction=0.05, aspect=24)
    bar.set_label(text, fontsize=style.TEXT)
    bar.ax.tick_params(labelsize=style.SMALL, color="0.6")
    bar.ax.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    bar.outline.set_visible(False)
