"""How cohorts are chosen, drawn: who is asked in thirty rounds, and which labels the asked ones hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import fedge
from fedge.edge import Choice, Clock, Profiles
from fedge.edge.draws import Array

PICTURE = Path(__file__).parents[2] / "docs/images/edge_choices.png"
CLIENTS, COHORT, ROUNDS, SEED = 30, 5, 30, 1
FLEET = Profiles("phone", "lte", spread=10.0, correlation=1.0, seed=0)
CHOICES = {"evenly": None, 'Choice("speed")': Choice("speed"), 'Choice("labels")': Choice("labels")}


def asked(federation: fedge.Federation, choice: Choice | None) -> tuple[Array, float]:
    """[rounds, clients]: who was asked, by the records of a run; and the mean seconds of a round."""
    algorithm = fedge.FedAvg(fedge.models.mlp(seed=0), lr=0.2, epochs=1)
    link = Clock(fedge.Engine().link(algorithm, federation), federation, FLEET, choice=choice)
    run = fedge.train(algorithm, federation, rounds=ROUNDS, cohort=COHORT, seed=SEED, link=link)
    found = np.zeros((ROUNDS, CLIENTS))
    for at, record in enumerate(run.history):
        found[at, record["cohort"]] = 1
    return found, float(np.mean([record["virtual_seconds"] for record in run.history]))


def draw() -> None:
    data = fedge.data.load("digits")
    lists = fedge.partition.labels_per_client(data.train_y, clients=CLIENTS, labels=2, seed=0)
    federation = fedge.Federation(data, lists)
    order = FLEET.devices(np.arange(CLIENTS)).up.argsort()  # slow ones first, so at the bottom
    holds = (federation.label_counts().numpy() > 0).astype(float)
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots(2, len(CHOICES), sharex=True, sharey="row", height_ratios=(3, 1.4))
    for column, (title, choice) in enumerate(CHOICES.items()):
        found, seconds = asked(federation, choice)
        above, below = axes[0][column], axes[1][column]
        above.pcolormesh(
            np.arange(1, ROUNDS + 1), np.arange(CLIENTS), found[:, order].T, cmap="Blues", vmin=0, vmax=1.2
        )
        above.set_title(f"{title}: {seconds:.3f} s per round", loc="left", fontsize=10)
        drawn = below.pcolormesh(
            np.arange(1, ROUNDS + 1), np.arange(10), (found @ holds).T, cmap="Oranges", vmin=0, vmax=4
        )
        below.set_xlabel("round")
        below.set_yticks(range(0, 10, 3))
    axes[0][0].set_ylabel("client, from slow (0) to fast")
    axes[1][0].set_ylabel("label")
    figure.colorbar(drawn, ax=list(axes[1]), label="asked clients\nthat hold it")
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})
