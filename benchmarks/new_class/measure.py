"""Digits: nine classes for some rounds, then the tenth appears at the clients that hold it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fedge
from fedge.core import Algorithm
from fedge.data import Data

NEW = 9  # the class that appears
BEFORE, AFTER = 20, 20  # rounds
CLIENTS, LABELS, COHORT = 100, 2, 20
SEEDS = (0, 1, 2)
SETTINGS: dict[str, Any] = {"lr": 0.2, "epochs": 5, "batch_size": 10}
FEDAVG = SETTINGS | {"lr": 0.5}  # what tuning chose for it on the digits with two labels per client (benchmarks/rounds)
Line = dict[str, Any]
Run = fedge.Run[Any]


def federations(data: Data, seed: int) -> tuple[fedge.Federation, fedge.Federation]:
    """The same clients without the examples of the new class, and with them."""
    lists = fedge.partition.labels_per_client(data.train_y, CLIENTS, labels=LABELS, seed=seed)
    kept, tested = data.train_y != NEW, data.test_y != NEW
    known = Data(data.train_x[kept], data.train_y[kept], data.test_x[tested], data.test_y[tested], NEW)
    place = (kept.cumsum(0) - 1).numpy()  # where an example is among those that are known
    old = [place[one[kept[one].numpy()]] for one in lists]
    return fedge.Federation(known, old), fedge.Federation(data, lists)


def fedova(outputs: int, seed: int, before: Run | None) -> Algorithm[Any]:
    """One binary model more: the others go on as they are."""
    if before is not None:
        grown: Algorithm[Any] = before.algorithm.add_class()  # type: ignore[attr-defined]
        return grown
    return fedge.FedOVA(fedge.FedAvg(fedge.models.mlp(outputs=2, seed=seed), **SETTINGS), classes=outputs)


def foreseen(outputs: int, seed: int, before: Run | None) -> Algorithm[Any]:
    """FedAvg whose network had the tenth output from the start."""
    return fedge.FedAvg(fedge.models.mlp(outputs=NEW + 1, seed=seed), **FEDAVG)


def grown(outputs: int, seed: int, before: Run | None) -> Algorithm[Any]:
    """FedAvg whose network gets a fresh tenth output when the class appears."""
    network = fedge.models.mlp(outputs=outputs, seed=seed)
    if before is not None:
        _fill(network, before.params)
    return fedge.FedAvg(network, **FEDAVG)


def _fill(network: nn.Module, params: dict[str, torch.Tensor]) -> None:
    """The first rows of every tensor are the trained ones."""
    with torch.no_grad():
        for name, leaf in network.named_parameters():
            leaf[: len(params[name])] = params[name]


Made = Callable[[int, int, Run | None], Algorithm[Any]]
METHODS: dict[str, Made] = {
    "FedOVA, a class added": fedova,
    "FedAvg, ten outputs from the start": foreseen,
    "FedAvg, an output added": grown,
}


def follow(name: str, seed: int, data: Data, rounds: tuple[int, int] = (BEFORE, AFTER)) -> Line:
    """The accuracies on old classes and on the new one after every round, and the bytes."""
    line: Line = {"method": name, "seed": seed, "old": [], "new": [], "bytes": []}
    run: Run | None = None
    for federation, outputs, count in zip(federations(data, seed), (NEW, NEW + 1), rounds, strict=True):
        algorithm = METHODS[name](outputs, seed, run)
        start = None if METHODS[name] is grown else run  # its network has another shape: it starts from its weights
        for _ in range(count):
            run = start = fedge.train(
                algorithm, federation, rounds=1, cohort=COHORT, seed=seed + 1000 * outputs, start=start
            )
            _add(line, run, data)
    return line


def _add(line: Line, run: Run, data: Data) -> None:
    right, is_new = run.predict(data.test_x) == data.test_y, data.test_y == NEW
    for part, chosen in (("old", ~is_new), ("new", is_new)):
        line[part].append(round(float(right[chosen].double().mean()), 5))
    last = run.history[-1]
    line["bytes"].append(last["up_bytes"] + last["down_bytes"])
