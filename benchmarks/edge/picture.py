"""Whom the server waits for, drawn: the same eight devices under every policy, and asynchronous. For docs/edge.md.

python -m benchmarks.edge.picture     # this picture and the others of the page: seconds, and all from real runs
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import fedge
from benchmarks.edge import picture_asynchronous, picture_choices, picture_partial
from fedge.algorithms.asynchronous import Asynchronous
from fedge.edge import Clock, Deadline, FirstOf, PartialWork, Profiles
from fedge.edge.events import Events
from fedge.edge.policies import Policy

PICTURE = Path(__file__).parents[2] / "docs/images/edge_policies.png"
CLIENTS, ROUNDS, SEED, STAY = 8, 3, 1, 0.3
FLEET = Profiles("microcontroller", "lte", spread=10.0, seed=3)
COLOURS = {"latency": "#d9d9d9", "receives": "#7fb3d5", "computes": "#1f618d", "sends": "#e59866"}


class Bar(NamedTuple):
    """One client at work: when it began, the seconds of its four parts, and whether its answer counted."""

    client: int
    begin: float
    parts: tuple[float, ...]
    counts: bool


def problem() -> tuple[fedge.Federation, fedge.FedAvg]:
    data = fedge.data.load("digits")
    lists = fedge.partition.dirichlet(data.train_y, CLIENTS, alpha=100.0, seed=0)
    return fedge.Federation(data, lists), fedge.FedAvg(fedge.models.mlp(seed=0), lr=0.2, epochs=1)


class Shown(Clock):
    """Keeps the time line of every round, not of a few alone."""

    bars: tuple[Bar, ...] = ()
    ends: tuple[float, ...] = ()
    now = 0.0

    def _note(self, asks: Any, devices: Any, works: Any, phase: Any, end: Any) -> None:
        super()._note(asks, devices, works, phase, end)
        spent = zip(*(part.tolist() for part in phase.parts(end.until)), strict=True)
        for at, parts in enumerate(spent):
            before = min(float(phase.latency[at]), float(end.until[at]))
            bar = Bar(int(phase.clients[at]), self.now, (before, *parts), bool(end.good[at]))
            self.bars += (bar,)
        self.now += end.seconds
        self.ends += (self.now,)


def waiting(policy: Policy | None, stay: float | None = None) -> tuple[list[Bar], list[float]]:
    """Rounds under a policy, and when each ended."""
    federation, algorithm = problem()
    link = Shown(fedge.Engine().link(algorithm, federation), federation, FLEET, policy, stay=stay)
    fedge.train(algorithm, federation, rounds=ROUNDS, seed=SEED, link=link)
    return list(link.bars), list(link.ends)


def asynchronous(algorithm: Asynchronous, until: float) -> tuple[list[Bar], list[float]]:
    """Dispatches that begin before a time, and when the model moved."""
    federation, _ = problem()
    bars, steps = list[Bar](), list[float]()

    class Seen(Events):
        def _dispatch(self, client: int) -> None:
            bars.append(Bar(client, self.going.now, self.trips[client].parts, True))
            super()._dispatch(client)

        def _move(self, row: int) -> Any:
            steps.append(self.going.now)
            return super()._move(row)

    link = Clock(fedge.Engine().link(algorithm, federation), federation, FLEET)
    link.events = Seen(algorithm, link.inner, link.load, FLEET, CLIENTS)
    fedge.train(algorithm, federation, rounds=10, seed=SEED, link=link)
    return [bar for bar in bars if bar.begin < until], [step for step in steps if step < until]


def panels() -> dict[str, tuple[list[Bar], list[float]]]:
    everybody = waiting(None)
    seconds = sorted(sum(bar.parts) for bar in everybody[0][:CLIENTS])
    deadline, partial = (math.ceil(1000 * taken) / 1000 for taken in (seconds[5], seconds[4]))  # as the titles say
    some = {
        "wait for all": everybody,
        f"Deadline({deadline})": waiting(Deadline(deadline)),
        "FirstOf(4)": waiting(FirstOf(4)),
        f"PartialWork({partial})": waiting(PartialWork(partial)),
        f"wait for all, stay = {STAY}": waiting(None, STAY),
    }
    last, inner = max(ends[-1] for _, ends in some.values()), problem()[1]
    some["FedBuff, a buffer of 3"] = asynchronous(fedge.FedBuff(inner, buffer=3), last)
    return some | {"FedAsync": asynchronous(fedge.FedAsync(inner), last)}


def draw() -> None:
    found = panels()
    figure = Figure(figsize=(9, 14), layout="constrained")
    axes = figure.subplots(len(found), 1, sharex=True)
    for axis, (title, (bars, ends)) in zip(axes, found.items(), strict=True):
        _panel(axis, title, bars, ends)
    handles = [Patch(color=colour) for colour in COLOURS.values()]
    axes[-1].set_xlabel("virtual seconds")
    axes[0].set_xlim(0, max(ends[-1] for _, ends in found.values()))
    axes[0].legend(handles, COLOURS, loc="lower center", bbox_to_anchor=(0.5, 1.15), ncols=len(COLOURS), frameon=False)
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


def _panel(axis: Axes, title: str, bars: list[Bar], ends: list[float]) -> None:
    for at, colour in enumerate(COLOURS.values()):
        left, width = [bar.begin + sum(bar.parts[:at]) for bar in bars], [bar.parts[at] for bar in bars]
        axis.barh([bar.client for bar in bars], width, left=left, color=colour, height=0.7)
    late = [bar for bar in bars if not bar.counts]
    axis.plot([bar.begin + sum(bar.parts) for bar in late], [bar.client for bar in late], "x", color="#c0392b")
    for end in ends:
        axis.axvline(end, color="black", linewidth=0.8)
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_yticks(range(CLIENTS))
    axis.set_ylabel("client")
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    for one in (draw, picture_partial.draw, picture_choices.draw, picture_asynchronous.draw):
        one()


if __name__ == "__main__":
    main()
