"""A tiny stand-in for the paper's experiments: digits in the place of Fashion-MNIST, so that they run in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HEAD = """\
name = "tiny"

[data]
name = "digits"
{validation}
[partition]
kind = "{kind}"
clients = {clients}
{labels}
[model]
name = "mlp"
hidden = [8]

[train]
rounds = 4
cohort = 4
{train}
"""
FEDAVG = """
[[algorithm]]
label = "{label}"
name = "averaged"
window = 3

[algorithm.inner]
name = "fedavg"
lr = 0.1
epochs = 1
batch_size = 20
"""
FEDOVA = """
[[algorithm]]
label = "{label}"
name = "averaged"
window = 3

[algorithm.inner]
name = "fedova"

[algorithm.inner.inner]
name = "fedavg"
lr = 0.1
epochs = 1
batch_size = 20
"""
FEDDANE = """
[[algorithm]]
label = "FedDANE"
name = "feddane"
epochs = 1
batch_size = 20
"""
GRID = """
[FedDANE]
mu = [0.01, 0.1, 0.5, 1.0]
[FedAvg]
lr = [0.01, 0.1, 0.3, 1.0]
[FedOVA]
lr = [0.05, 0.5]
lr_decay = [1.0, 0.9]
"""
PAPER = """
[titles]
noniid = "Labels a client"
clients = "Clients"
optimisers = "Optimisers"
batch-epochs = "Batches"
[datasets]
fmnist = "Digits"
[targets]
fmnist = { test = 20, train = 99.9 }
[goals]
fmnist = 20
[noniid]
fmnist-l2 = { FedAvg = 10.0, FedOVA = 99.0 }
[clients]
fmnist-k20 = { FedAvg = 50.0, FedOVA = 60.0 }
fmnist-k40 = { FedAvg = 45.0, FedOVA = 59.5 }
[optimisers]
fmnist = { FedAvg = [98.2, 200] }
"""


def head(labels: int | None = 2, clients: int = 20, validation: float = 0, train: str = "") -> str:
    return HEAD.format(
        kind="iid" if labels is None else "labels_per_client",
        labels="" if labels is None else f"labels = {labels}",
        clients=clients,
        validation=f"validation = {validation}" if validation else "",
        train=train,
    )


def write(root: Path) -> Path:
    """The files of four experiments and of tuning."""
    both = FEDAVG.format(label="FedAvg") + FEDOVA.format(label="FedOVA")
    files = {
        "noniid/fmnist-l2.toml": head() + both,
        "noniid/fmnist-l5.toml": head(5) + both,
        "clients/fmnist-k20.toml": head() + both,
        "clients/fmnist-k40.toml": head(clients=40) + both,
        "optimisers/fmnist.toml": head(None, train="evaluate_train = true") + FEDAVG.format(label="FedAvg"),
        "batch-epochs/fmnist.toml": head() + FEDOVA.format(label="FedOVA, B = 20"),
        "tune/fmnist-noniid.toml": head(validation=0.2) + both + FEDDANE,
        "grid.toml": GRID,
        "paper.toml": PAPER,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def untimed(path: Path) -> list[dict[str, Any]]:
    """The lines of a store, in any order, as they are the same whenever they were made."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for name in ("seconds", "seconds_a_round", "at_a_time"):
            line.pop(name, None)
    return sorted(lines, key=lambda line: line["key"])
