"""Partial work on digits: FedProx and FedNova, with long and with short local steps.

    python -m benchmarks.edge.partial     # the runs that are missing, half a minute, and the table in docs/edge.md

100 microcontrollers on Wi-Fi with two labels each and a ten-fold spread, 20 per round, five local epochs, 30 rounds,
`PartialWork(0.02)`; accuracy is the mean of the last three rounds. Computing is most of a phase there: of 100 asked
with batches of 10, 14 did one step of ten, 14 all, and 72 something between. On phones it is next to nothing, and a
client does one step or all of them.
"""

from __future__ import annotations

import json
from statistics import mean, stdev
from typing import Any

import torch

import fedge
from benchmarks.edge import measure
from fedge.edge import Clock, PartialWork, Profiles

FILE = measure.RESULTS / "partial.jsonl"
METHODS = {"FedProx": fedge.FedProx, "FedNova": fedge.FedNova}
SETTINGS = {  # lr and batch size
    "lr 0.5, batches of 10": (0.5, 10),
    "lr 0.5, batches of 15": (0.5, 15),
    "lr 0.2, batches of 10": (0.2, 10),
}
ROUNDS, LAST, SECONDS, SEEDS = 30, 3, 0.02, (0, 1, 2)
FLEET = Profiles("microcontroller", "wifi", spread=10.0)
Line = dict[str, Any]


def run(method: str, setting: str, seed: int) -> Line:
    data = fedge.data.load("digits")
    lists = fedge.partition.labels_per_client(data.train_y, measure.CLIENTS, labels=measure.LABELS, seed=seed)
    federation, (lr, batch_size) = fedge.Federation(data, lists), SETTINGS[setting]
    algorithm = METHODS[method](fedge.models.mlp(seed=seed), lr=lr, batch_size=batch_size)
    link = Clock(fedge.Engine().link(algorithm, federation), federation, FLEET, PartialWork(SECONDS))
    done = fedge.train(algorithm, federation, rounds=ROUNDS, cohort=measure.COHORT, seed=seed, link=link)
    final = mean(record["test_accuracy"] for record in done.history[-LAST:])
    key = {"method": method, "setting": setting, "seed": seed}
    return {**key, "final": round(final, 5), "rounds": ROUNDS, "torch": torch.__version__}


def rows() -> list[list[str]]:
    """Settings down, methods across: mean and deviation over the seeds, in %."""
    head = ["local steps", *(f"{method}, %" for method in METHODS)]
    return [head, *([setting, *(_cell(method, setting) for method in METHODS)] for setting in SETTINGS)]


def _cell(method: str, setting: str) -> str:
    some = [line for line in measure.lines(FILE) if (line["method"], line["setting"]) == (method, setting)]
    values = [100 * line["final"] for line in some]
    if len(values) < 2:
        return "not run"
    return f"{mean(values):.1f} ± {stdev(values):.1f}"


def main() -> None:
    from benchmarks.edge import page  # it shows what is stored here

    done = {(line["method"], line["setting"], line["seed"]) for line in measure.lines(FILE)}
    wanted = [(method, setting, seed) for seed in SEEDS for method in METHODS for setting in SETTINGS]
    for key in (key for key in wanted if key not in done):
        line = run(*key)
        with FILE.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(*key, f"{line['final']:.3f}", flush=True)
    page.write()


if __name__ == "__main__":
    main()
