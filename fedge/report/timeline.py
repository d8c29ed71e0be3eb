"""The time line of a round: who received, computed, sent, waited or was dropped."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fedge.report import style
from fedge.report.read import RunFolder

MOST = 30  # clients: more would be thinner than a line
PARTS = {"latency": "0.75", "down": style.colour(0), "computing": style.colour(4), "up": style.colour(2)}
WAITING = "0.93"
DROPPED = style.colour(1)


def timeline(run: RunFolder) -> tuple[int, Figure]:
    """The number and the picture of the last round whose time line was recorded: one bar per client and phase."""
    record = next(one for one in reversed(run.rounds) if one.get("timeline"))
    phases: list[dict[str, Any]] = record["timeline"]
    rows = _slowest(phases)
    figure = style.figure(style.SIZE[0], 1.3 + 0.16 * len(rows))
    axes = figure.subplots()
    style.dress(axes, "time on the devices (s)", "client")
    begin = 0.0
    for phase in phases:
        for client, *parts, counted in phase["clients"]:
            if client in rows:
                _bar(axes, rows[client], begin, parts, phase["seconds"], counted)
        begin += phase["seconds"]
        axes.axvline(begin, color="0.45", linewidth=0.9, linestyle=(0, (1, 2)))
    axes.set_yticks(range(len(rows)), [str(client) for client in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, begin * 1.02 or 1)
    axes.grid(axis="y", visible=False)
    names = {**PARTS, "waiting": WAITING, "dropped": DROPPED}
    style.legend(figure, [Patch(color=colour) for colour in names.values()], list(names))
    return int(record.get("round", 0)), figure


def _slowest(phases: list[dict[str, Any]]) -> dict[int, int]:
    """The clients to draw, by number, and the place of each: the slowest of them if there are many."""
    total: dict[int, float] = {}
    for phase in phases:
        for client, *parts, _ in phase["clients"]:
            total[client] = total.get(client, 0.0) + sum(parts)
    chosen = sorted(total, key=lambda client: -total[client])[:MOST]
    return {client: place for place, client in enumerate(sorted(chosen))}


def _bar(axes: Axes, place: int, begin: float, parts: list[float], end: float, counted: bool) -> None:
    left = begin
    for width, colour in zip(parts, PARTS.values(), strict=True):
        axes.barh(place, width, left=left, height=0.7, color=colour, linewidth=0)
        left += width
    if counted:
        axes.barh(place, begin + end - left, left=left, height=0.7, color=WAITING, linewidth=0)
    else:
        axes.plot([left], [place], marker="x", color=DROPPED, markersize=5, markeredgewidth=1.5, clip_on=False)
