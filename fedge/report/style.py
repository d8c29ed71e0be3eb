"""How every figure looks: colours, sizes, grid, and a legend that covers no data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedge.report.groups import Group, spread
from fedge.report.series import last

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
MOST_LINES, BEST = 12, 7  # lines with a colour; of more, so many of the best: the eighth is grey, as the others are
PLAIN = "#B8BEC6"  # of the others
SIZE = (6.0, 3.7)  # inches
TEXT, SMALL = 10.0, 9.0  # points
LEGEND_CHARACTERS = 13.5  # that fit in one inch of legend, at SMALL
LEGEND_ROW = 0.19  # inches


def figure(width: float = SIZE[0], height: float = SIZE[1]) -> Figure:
    """An empty figure that belongs to no window and to no pyplot."""
    return Figure(figsize=(width, height), layout="constrained")


class Look(NamedTuple):
    """How the lines of one group are drawn."""

    colour: str
    stroke: Stroke
    coloured: bool  # False: one of many, thin and grey, and not in the legend
    order: float  # what lies above


def looks(groups: Sequence[Group]) -> list[Look]:
    """A colour and a stroke each; of more than a legend can hold, only the best have one."""
    if len(groups) <= MOST_LINES:
        return [Look(colour(at), stroke(at), True, 2.5) for at in range(len(groups))]
    ranked = sorted(range(len(groups)), key=lambda at: rank(groups[at]))[:BEST]
    return [
        Look(colour(ranked.index(at)), stroke(ranked.index(at)), True, 2.5 - 0.01 * ranked.index(at))
        if at in ranked
        else Look(PLAIN, STROKES[0], False, 1.5)
        for at in range(len(groups))
    ]


def rank(group: Group) -> float:
    """Lower is better: by the final accuracy, or else by the last loss, of the runs that did not fail."""
    runs = [run for run in group.runs if not run.failed]
    accuracy = spread(run.summary.get("final_accuracy", last(run, "test_accuracy")) for run in runs)
    loss = spread(last(run, "test_loss") for run in runs)
    return -accuracy.mean if accuracy else loss.mean if loss else math.inf


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
    """Above the axes; every row after the first makes the figure taller, not the data smaller.

    An entry belongs to the group of its handle.
    """
    texts = [plain(label) for label in labels]
    columns = _columns([len(text) for text in texts], figure.get_figwidth() * LEGEND_CHARACTERS)
    rows = math.ceil(len(texts) / columns)
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * (rows - 1))
    made = figure.legend(
        handles,
        texts,
        loc="outside upper center",
        ncols=columns,
        fontsize=SMALL,
        frameon=False,
        handlelength=3.0,
        columnspacing=1.4,
    )
    for handle, line, text in zip(handles, made.legend_handles, made.get_texts(), strict=True):
        for part in (line, text):
            if part is not None and handle.get_gid():
                part.set_gid(handle.get_gid())


def _columns(lengths: Sequence[int], room: float) -> int:
    """The most columns that fit, without more of them than the rows need.

    A legend fills column by column, the first ones with one entry more where they do not come out even.
    """
    for count in range(len(lengths), 1, -1):
        rows = math.ceil(len(lengths) / count)
        if math.ceil(len(lengths) / rows) < count:
            continue  # as many rows as with a column less
        least, longer = divmod(len(lengths), count)
        ends = [0, *accumulate(least + (at < longer) for at in range(count))]
        widths = [max(lengths[begin:end]) for begin, end in pairwise(ends)]
        if sum(widths) + 8 * count <= room:
            return count
    return 1
