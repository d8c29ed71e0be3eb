"""One Flower simulation in which every algorithm trains over the fleet: python -m tests.deploy.parity_run OUT."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

import fedge
from fedge.deploy import FlowerLink, Roster, client_app
from tests.deploy.parity_algorithms import CLIENTS, COHORT, ROUNDS, SEED, algorithms, federation


def load(client: int):
    fed = federation()
    mine = fed.examples(client)
    return fed.data.train_x[mine], fed.data.train_y[mine]


def main(out: Path) -> None:
    app = ServerApp()

    @app.main()
    def train(grid: Grid, context: Context) -> None:
        found, fed = algorithms(), federation()
        roster = Roster(grid, CLIENTS, found, print)
        roster.wait(CLIENTS, 150, 150)
        for label, algorithm in found.items():
            link = FlowerLink(algorithm, fed, grid, roster, label=label, deadline=120)
            run = fedge.train(algorithm, fed, rounds=ROUNDS, cohort=COHORT, seed=SEED, link=link)
            dropped = [record["dropped"] for record in run.history]
            result = {"params": run.params, "ledger": run.ledger.as_dicts(), "dropped": dropped}
            torch.save(result, out / f"{label}.pt")

    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": 2, "log_to_driver": False},
    }
    run_simulation(app, client_app(algorithms, load), num_supernodes=CLIENTS, backend_config=backend)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
