"""What a policy does to those whom it leaves out: accuracy by kind of device, where slow devices hold their own labels.

    python -m benchmarks.edge.fairness     # the runs that are missing, and docs/fairness.md

The digits of `fedge run` on 100 LTE phones with two labels each. Clients that hold a 0 or a 1 have old phones, a tenth
as fast in computing and sending: so what they know is known to few others. Accuracy of a kind: that of the classes,
weighted by what clients of the kind hold (`fedge.edge.accuracy_by_kind`), the mean of the last five rounds.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch

import fedge
from benchmarks.edge import cost, rounds
from benchmarks.edge.measure import CLIENTS, COHORT, LABELS, RESULTS
from benchmarks.readme import replaced
from fedge.core import Algorithm
from fedge.edge import Choice, Clock, Deadline, FirstOf, PartialWork, Profiles, Table, accuracy_by_kind, by_kind
from fedge.edge.table import write

FILE = RESULTS / "fairness.jsonl"
PAGE, COMMAND = Path(__file__).parents[2] / "docs" / "fairness.md", "python -m benchmarks.edge.fairness"
OLD, SLOWER, LAST, ROUNDS, SEEDS = (0, 1), 10.0, 5, 50, (0, 1, 2)
KINDS = ("new phone", "old phone")
SECONDS = 0.25  # uncut, an old phone needs 0.26 s with FedAvg and 0.41 s with FedOVA
POLICIES: dict[str, dict[str, Any]] = {
    "wait for all": {},
    f"deadline of {SECONDS:g} s": {"policy": Deadline(SECONDS)},
    "first 15 of 20": {"policy": FirstOf(15)},
    "first 10 of 20": {"policy": FirstOf(10)},
    f"partial work, {SECONDS:g} s": {"policy": PartialWork(SECONDS)},
    "cohorts by speed": {"choice": Choice("speed")},
    "cohorts by labels": {"choice": Choice("labels")},
}
Line = dict[str, Any]


def fedavg(seed: int) -> Algorithm[Any]:
    return fedge.FedAvg(fedge.models.mlp(seed=seed), lr=0.5, batch_size=10)


def fedova(seed: int) -> Algorithm[Any]:
    return fedge.FedOVA(fedge.FedAvg(fedge.models.mlp(outputs=2, seed=seed), lr=0.2, batch_size=10))


METHODS: dict[str, Callable[[int], Algorithm[Any]]] = {"FedAvg": fedavg, "FedOVA": fedova}


def fleet(federation: fedge.Federation, folder: Path) -> Table:
    """Phones; those of clients that hold a 0 or a 1 are old."""
    devices = Profiles("phone", "lte").devices(np.arange(federation.clients))
    old = federation.label_counts()[:, list(OLD)].sum(1).numpy() > 0
    factor = np.where(old, 1 / SLOWER, 1.0)
    found = devices._replace(
        flops=devices.flops * factor, down=devices.down * factor, up=devices.up * factor, kind=old.astype(np.int64)
    )
    write(folder / "phones.csv", found, KINDS)
    return Table(str(folder / "phones.csv"), federation.clients)


def run(method: str, policy: str, seed: int) -> Line:
    data = fedge.data.load("digits")
    lists = fedge.partition.labels_per_client(data.train_y, CLIENTS, labels=LABELS, seed=seed)
    federation = fedge.Federation(data, lists)
    algorithm = METHODS[method](seed)
    with tempfile.TemporaryDirectory() as folder:
        devices = fleet(federation, Path(folder))
        kinds = by_kind(federation, devices)
        link = Clock(fedge.Engine().link(algorithm, federation), federation, devices, **POLICIES[policy])
        done = fedge.train(algorithm, federation, rounds=ROUNDS, cohort=COHORT, seed=seed, link=link)
    late = [accuracy_by_kind(kinds, record["test_class_accuracy"]) for record in done.history[-LAST:]]
    return {
        "method": method,
        "policy": policy,
        "seed": seed,
        "clients": dict(zip(kinds["kinds"], kinds["clients"], strict=True)),
        "accuracy": {kind: round(mean(one[kind] or 0.0 for one in late), 5) for kind in kinds["kinds"]},
        "final": round(mean(record["test_accuracy"] for record in done.history[-LAST:]), 5),
        "seconds": round(sum(record["virtual_seconds"] for record in done.history) / ROUNDS, 5),
        "torch": torch.__version__,
    }


def lines() -> list[Line]:
    return [json.loads(line) for line in FILE.read_text("utf-8").splitlines()] if FILE.exists() else []


def table(stored: list[Line]) -> str:
    """Policies down; accuracy by kind of device and seconds per round, for each method."""
    head = ["policy", *(f"{method}: {what}" for method in METHODS for what in (*KINDS, "s per round"))]
    rows = [[policy, *(cell for method in METHODS for cell in _cells(stored, method, policy))] for policy in POLICIES]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cells(stored: list[Line], method: str, policy: str) -> list[str]:
    some = [line for line in stored if (line["method"], line["policy"]) == (method, policy)]
    if not some:
        return ["not run"] * 3
    return [*(_spread([100 * line["accuracy"][kind] for line in some]) for kind in KINDS), _pace(some)]


def _pace(some: list[Line]) -> str:
    return f"{mean(line['seconds'] for line in some):.3f}"


def _spread(values: list[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def text(page: str) -> str:
    """The page with its tables made from the stored results."""
    found = cost.stored()
    page = replaced(page, "fairness", table(lines()), COMMAND, PAGE.name)
    page = replaced(page, "clock_a", _markdown(rounds.table_a(found["rounds_a"])), COMMAND, PAGE.name)
    page = replaced(page, "events", _markdown(cost.events_table(found)), COMMAND, PAGE.name)
    whole = f"{_markdown(rounds.table(found['rounds']))}\nMedians; {cost.about(found)}.\n"
    return replaced(page, "clock", whole, COMMAND, PAGE.name)


def _markdown(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]]) + "\n"


def main() -> None:
    done = {(line["method"], line["policy"], line["seed"]) for line in lines()}
    for seed in SEEDS:
        for method in METHODS:
            for policy in POLICIES:
                if (method, policy, seed) not in done:
                    line = run(method, policy, seed)
                    with FILE.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
                    print(line, flush=True)
    PAGE.write_text(text(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
