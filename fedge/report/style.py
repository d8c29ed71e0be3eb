"""How every figure looks: colours, sizes, grid, and a legend that covers no data."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

# Okabe and Ito's palette, which colour-blind readers tell apart; its yellow, faint on white, is
# replaced by grey.
PALETTE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8A8A8A",
)
Stroke = tuple[float, tuple[float, ...]]  # an offset, and the lengths of dashes and gaps in widths of the line
# Every run has its own besides its colour, so that curves which lie on top of each other are both seen. As many as
# there are colours less one: the pairs repeat only after 56 runs.
STROKES: tuple[Stroke, ...] = (
    (0, ()),
    (0, (5, 1.6)),
    (0, (1.2, 1.8)),
    (0, (5, 1.4, 1.2, 1.4)),
    (0, (9, 2)),
    (0, (5, 1.4, 1.2, 1.4, 1.2, 1.4)),
    (0, (2.5, 1.5)),
)
SIZE = (6.0, 3.7)  # inches
TEXT, SMALL = 10.0, 9.0  # points
LEGEND_CHARACTERS = 13.5  # that fit in one inch of legend, at SMALL
LEGEND_ROW = 0.19  # inches


def figure(width: float = SIZE[0], height: float = SIZE[1]) -> Figure:
    """An empty figure that belongs to no window and to no pyplot."""
    return Figure(figsize=(width, height), layout="constrained")


def colour(at: int) -> str:
    return PALETTE[at % len(PALETTE)]


def stroke(at: int) -> Stroke:
    return STROKES[at % len(STROKES)]


def plain(text: object) -> str:
    """Text for matplotlib to draw as it is: no formulas, no hidden labels, one line."""
    line = " ".join(str(text).split()).replace("$", r"\$")
    return f" {line}" if line.startswith("_") else line


def dress(axes: Axes, x: str, y: str) -> None:
    """Labels, a light grid behind the data, and two spines."""
    axes.set_xlabel(x, fontsize=TEXT)
    axes.set_ylabel(y, fontsize=TEXT)
    axes.tick_params(labelsize=SMALL, color="0.6")
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("0.6")


def ticks(axes: Axes, whole: bool) -> None:
    """Round numbers on the horizontal axis: 12,000 and never 1.2e4; `whole`: rounds have no halves."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=whole, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Above the axes; every row after the first makes the figure taller, not the data smaller."""
    texts = [plain(label) for label in labels]
    columns = _columns([len(text) for text in texts], figure.get_figwidth() * LEGEND_CHARACTERS)
    rows = math.ceil(len(texts) / columns)
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * (rows - 1))
    figure.legend(
        handles,
        texts,
        loc="outside upper center",
        ncols=columns,
        fontsize=SMALL,
        frameon=False,
        handlelength=3.0,
        columnspacing=1.4,
    )


def _columns(lengths: Sequence[int], room: float) -> int:
    """The fewest rows that fit, and then the fewest columns; a legend fills column by column."""
    for rows in range(1, len(lengths)):
        columns = [max(lengths[at : at + rows]) for at in range(0, len(lengths), rows)]
        if sum(columns) + 8 * len(columns) <= room:
            return len(columns)
    return 1
