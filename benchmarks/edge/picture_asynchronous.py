"""Asynchronous FedOVA, drawn: every class has its own versions, and what the mean of late rounds does to the curve."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import fedge
from fedge.algorithms.asynchronous import Late
from fedge.edge import Clock, Profiles
from fedge.edge.events import Events

PICTURE = Path(__file__).parents[2] / "docs/images/edge_asynchronous.png"
CLIENTS, COHORT, ROUNDS, SEED, BUFFER, WINDOW = 100, 20, 40, 0, 4, 10
RARE, HOLDERS = 9, 3  # only so many clients keep this label
FLEET = Profiles("phone", "lte", spread=10.0)


def federation() -> fedge.Federation:
    """Two digits per client; all but three of those who would hold a 9 keep their other digit alone."""
    data = fedge.data.load("digits")
    lists = fedge.partition.labels_per_client(data.train_y, clients=CLIENTS, labels=2, seed=SEED)
    labels, kept, found = data.train_y.numpy(), 0, list[Any]()
    for own in map(np.asarray, lists):
        kept += RARE in labels[own]
        found.append(own if kept <= HOLDERS else own[labels[own] != RARE])
    return fedge.Federation(data, found)


def fedova() -> fedge.FedOVA:
    return fedge.FedOVA(fedge.FedAvg(fedge.models.mlp(outputs=2, seed=SEED), lr=0.2, batch_size=10))


METHODS = {
    "FedOVA, waits for all": fedova,
    f"asynchronous, buffers of {BUFFER}": lambda: fedge.FedBuff(fedova(), buffer=BUFFER),
    f"the same, mean of {WINDOW} late rounds": lambda: fedge.Averaged(fedge.FedBuff(fedova(), buffer=BUFFER), WINDOW),
}


def run(algorithm: Any) -> tuple[list[float], list[float], list[tuple[float, int]]]:
    """When rounds end, the accuracy then, and when which class moved."""
    where, moves = federation(), list[tuple[float, int]]()

    class Seen(Events):
        def _move(self, row: int) -> Any:
            moves.append((self.going.now, row))
            return super()._move(row)

    link = Clock(fedge.Engine().link(algorithm, where), where, FLEET)
    if late := Late.of(algorithm):
        link.events = Seen(late.algorithm, link.inner, link.load, FLEET, CLIENTS)
    done = fedge.train(algorithm, where, rounds=ROUNDS, cohort=COHORT, seed=SEED, link=link)
    seconds = list(accumulate(record["virtual_seconds"] for record in done.history))
    return seconds, [100 * record["test_accuracy"] for record in done.history], moves


def draw() -> None:
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, build in METHODS.items():
        seconds, accuracy, moves = run(build())
        right.plot(seconds, accuracy, label=name, linewidth=1.3)
        if name == list(METHODS)[1]:
            _versions(left, moves)
    right.set_xlabel("virtual seconds")
    right.set_ylabel("test accuracy, %")
    right.set_xlim(0, seconds[-1])
    right.set_ylim(60, 100)
    right.legend(frameon=False, fontsize=9, loc="lower right")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


def _versions(axis: Axes, moves: list[tuple[float, int]]) -> None:
    """A step per move of a class."""
    for row in range(10):
        times = [0.0, *(when for when, moved in moves if moved == row)]
        told = {"color": "#c0392b", "label": f"class {RARE}, which {HOLDERS} clients hold"} if row == RARE else {}
        told = told or {"color": "#1f618d", "label": "the other classes" if not row else None}
        axis.step(times, range(len(times)), where="post", linewidth=1.2, **told)
    axis.legend(frameon=False, fontsize=9)
    axis.set_xlabel("virtual seconds")
    axis.set_ylabel("version of the class")
