"""A population of devices: how fast each computes and sends."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from fedge.report import style


def devices_figure(flops: Sequence[float], up: Sequence[float], kinds: Sequence[str]) -> Figure:
    """FLOP/s across, bit/s up, both logarithmic; one point per device, one colour per kind."""
    figure = style.figure()
    axes = figure.subplots()
    style.dress(axes, "computing (FLOP/s)", "sending (bit/s)")
    names = list(dict.fromkeys(kinds))
    for at, name in enumerate(names):
        chosen = [place for place, kind in enumerate(kinds) if kind == name]
        x, y = [flops[place] for place in chosen], [up[place] for place in chosen]
        axes.scatter(x, y, s=12, color=style.colour(at), alpha=0.6, linewidths=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())  # labels of 2, 3, ... would lie on top of each other
    axes.yaxis.set_minor_formatter(NullFormatter())
    handles = [Line2D([], [], color=style.colour(at), marker="o", linestyle="") for at in range(len(names))]
    style.legend(figure, handles, [f"{name} ({kinds.count(name)})" for name in names])
    return figure
