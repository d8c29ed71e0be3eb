"""Drop-outs: replies that were lost or refused, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedge.report import style
from fedge.report.read import RunFolder
from fedge.report.series import elapsed

STRIPS = 12


def dropouts_figure(runs: Sequence[RunFolder]) -> Figure:
    """Dropped replies per round; one strip for every run that has any, 12 at most: those with the most."""
    every = [(at, run) for at, run in enumerate(runs) if any(dropped(run))]
    most = sorted(every, key=lambda one: -sum(map(len, dropped(one[1]))))[:STRIPS]
    found = [one for one in every if one in most]
    figure = style.figure(style.SIZE[0], max(2.4, 0.8 + 1.1 * len(found)))
    rows = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (at, run) in zip(rows, found, strict=True):
        heights = [len(drops) for drops in dropped(run)]
        axes.bar(elapsed(run, "rounds"), heights, color=style.colour(at), width=0.9)
        style.dress(axes, "", "")
        axes.set_title(style.plain(run.label), fontsize=style.SMALL, loc="left")
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    style.ticks(rows[-1], whole=True)
    rows[-1].set_xlabel("round", fontsize=style.TEXT)
    figure.supylabel("dropped replies", fontsize=style.TEXT)
    return figure


def dropped(run: RunFolder) -> list[list[dict[str, Any]]]:
    """For every round, its drop-outs: {client, task, reason}."""
    return [list(record.get("dropped") or []) for record in run.rounds]
