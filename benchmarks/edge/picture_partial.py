"""Partial work, drawn: the steps that fit, and what an update then weighs with FedProx and with FedNova."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import fedge
from fedge.edge import Clock, PartialWork, Profiles

PICTURE = Path(__file__).parents[2] / "docs/images/edge_partial.png"
CLIENTS, SECONDS = 8, 0.14
FLEET = Profiles("microcontroller", "lte", spread=10.0, seed=3)  # those of benchmarks/edge/picture.py
DONE, LEFT, PROX, NOVA = "#1f618d", "#d9d9d9", "#7fb3d5", "#e59866"


class Seen(Clock):
    """Keeps the steps that every client did, and all that the task has."""

    done: dict[int, int]
    full: dict[int, int]

    def _carry(self, at: Any, asks: Any, phase: Any, end: Any) -> Any:
        (work,) = [self.load.of(ask, phase.clients) for ask in asks]
        self.full = dict(zip(phase.clients.tolist(), work.steps[0].tolist(), strict=True))
        limits = asks[0].limits or {}
        self.done = {client: limits.get(client, (steps,))[0] for client, steps in self.full.items()}
        return super()._carry(at, asks, phase, end)


def steps() -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Of one round: steps done, steps of the whole task, examples; by client."""
    data = fedge.data.load("digits")
    federation = fedge.Federation(data, fedge.partition.dirichlet(data.train_y, CLIENTS, alpha=100.0, seed=0))
    algorithm = fedge.FedNova(fedge.models.mlp(seed=0), lr=0.2, epochs=1)
    link = Seen(fedge.Engine().link(algorithm, federation), federation, FLEET, PartialWork(SECONDS))
    fedge.train(algorithm, federation, rounds=1, link=link)
    return link.done, link.full, {k: len(federation.examples(k)) for k in range(CLIENTS)}


def draw() -> None:
    done, full, examples = steps()
    total = sum(examples.values())
    share = {k: n / total for k, n in examples.items()}
    mean = sum(share[k] * done[k] for k in done)  # FedNova's number of steps of the server
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    clients = list(done)
    left.barh(clients, [full[k] for k in clients], color=LEFT, label="steps of the task")
    left.barh(clients, [done[k] for k in clients], color=DONE, label="steps done")
    left.set_title(f"PartialWork({SECONDS}): steps", loc="left", fontsize=10)
    places = [[k + shift for k in clients] for shift in (0.2, -0.2)]
    right.barh(places[0], [share[k] for k in clients], 0.38, color=PROX, label="FedAvg, FedProx: n_k / n")
    nova = [share[k] * mean / done[k] for k in clients]
    right.barh(places[1], nova, 0.38, color=NOVA, label="FedNova: n_k / n · mean steps / steps_k")
    right.set_title("what its update is multiplied with", loc="left", fontsize=10)
    for axis in (left, right):
        axis.set_yticks(clients)
        axis.set_ylabel("client")
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})
