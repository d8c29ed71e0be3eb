"""Choose every method's setting on a validation part, then run it with three seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedge
from fedge.data import Data

from .methods import Method, Setting

CLIENTS, LABELS, COHORT = 100, 2, 20
ROUNDS, LAST, SEEDS = 50, 5, (0, 1, 2)
TUNING_ROUNDS, VALIDATION = 30, 0.2
TARGET = 0.85
CONFIG = {
    "data": "digits",
    "clients": CLIENTS,
    "labels": LABELS,
    "cohort": COHORT,
    "rounds": ROUNDS,
    "last": LAST,
    "seeds": list(SEEDS),
    "tuning_rounds": TUNING_ROUNDS,
    "validation": VALIDATION,
    "target": TARGET,
}


def validation_split(data: Data, part: float = VALIDATION, seed: int = 0) -> Data:
    """The training set alone, cut in two: `part` of every label becomes what is evaluated on."""
    draw = np.random.default_rng(seed)
    held: list[Tensor] = []
    for label in range(data.classes):
        own = torch.nonzero(data.train_y == label).flatten()
        held.append(own[draw.permutation(len(own))[: round(part * len(own))]])
    away = torch.zeros(len(data.train_y), dtype=torch.bool)
    away[torch.cat(held)] = True
    x, y = data.train_x, data.train_y
    return Data(x[~away], y[~away], x[away], y[away], data.classes)


def train(method: Method, setting: Setting, data: Data, rounds: int, seed: int) -> fedge.Run[Any]:
    """The seed is that of the partition, the model and the training."""
    lists = fedge.partition.labels_per_client(data.train_y, CLIENTS, labels=LABELS, seed=seed)
    algorithm = method.build(seed, **setting)
    return fedge.train(algorithm, fedge.Federation(data, lists), rounds=rounds, cohort=COHORT, seed=seed)


def final(run: fedge.Run[Any]) -> float:
    """The mean accuracy of the last rounds."""
    return float(np.mean([record["test_accuracy"] for record in run.history[-LAST:]]))


def tune(method: Method, data: Data) -> list[dict[str, Any]]:
    """The validation accuracy of every setting of the grid."""
    part = validation_split(data)
    lines = []
    for setting in method.grid:
        accuracy = final(train(method, setting, part, TUNING_ROUNDS, seed=0))
        lines.append({"kind": "trial", "method": method.name, "setting": setting, "validation": round(accuracy, 4)})
    return lines


def chosen(trials: list[dict[str, Any]]) -> Setting:
    """The setting with the best validation accuracy, the first of equals."""
    best: Setting = max(trials, key=lambda trial: trial["validation"])["setting"]
    return best


def judged(method: Method, setting: Setting, data: Data, seed: int) -> dict[str, Any]:
    """One run on the real test set, with every byte."""
    run = train(method, setting, data, ROUNDS, seed)
    accuracies = [record["test_accuracy"] for record in run.history]
    moved = [record["up_bytes"] + record["down_bytes"] for record in run.history]
    before = run.ledger.total(round=0)
    setup = before["up"] + before["down"]
    reached = next((t for t, accuracy in enumerate(accuracies, 1) if accuracy >= TARGET), None)
    phases = dict.fromkeys((row.phase, row.task) for row in run.ledger if row.round == ROUNDS)
    return {
        "kind": "run",
        "method": method.name,
        "setting": setting,
        "seed": seed,
        "final": round(final(run), 5),
        "rounds_to_target": reached,
        "bytes_a_round": sum(moved) / ROUNDS,
        "setup_bytes": setup,
        "bytes_to_target": None if reached is None else setup + sum(moved[:reached]),
        "phases": [task for _, task in phases],
        "dropped": sum(len(record["dropped"]) for record in run.history),
        "accuracy": [round(accuracy, 4) for accuracy in accuracies],
    }
