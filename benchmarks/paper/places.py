"""The experiments of the paper: their files and what the paper states.

FEDGE_PAPER names a folder with a copy of the TOML files, changed as you like.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from fedge import sweep
from fedge.experiment import ExperimentError
from fedge.sweep import Entry, Files
from fedge.sweep.files import Setting
from fedge.sweep.halving import Backbones

PAPER_S = ("optimisers", "curves", "noniid", "sharing", "clients", "batch-epochs")
BEYOND = (  # what the paper does not have
    "clipped", "server-step", "standardised", "splits", "acting", "balanced-sharing"
)  # fmt: skip
EXPERIMENTS = (*PAPER_S, *BEYOND)
# Where a method was not tuned itself (CIFAR-10), it takes the step size of the method whose local work it does.
BACKBONES: Backbones = {
    "FedOVA": "FedAvg",
    "Data sharing 5 %": "FedAvg",
    "Data sharing 10 %": "FedAvg",
    "FedDANE": "FedAvg-SGD",
    "Fisher L-BFGS": ("FedAvg-SGD", {"lr": "local_lr"}),
    "Server step": "FedAvg + server step",
    "FedOVA + server step": "FedAvg + server step",
    "Standardised FedOVA": "Standardised FedAvg",
    "Standardised FedAvg-SGD": "Standardised FedAvg",
    "Standardised FedAvg + server step": "FedAvg + server step",
    "Standardised server step": "FedAvg + server step",
    "Zhao 5 %": "Data sharing 10 %",
    "Zhao 10 %": "Data sharing 10 %",
}
DATASETS = ("fmnist", "cifar10", "kws")
VARIABLE = "FEDGE_PAPER"
PAPER = "paper.toml"


def root() -> Path:
    """The folder with one folder per experiment."""
    if not (given := os.environ.get(VARIABLE)):
        return Path(__file__).resolve().parent
    if not (Path(given) / PAPER).is_file():
        raise ExperimentError(f"{VARIABLE} is {given!r}, a folder without {PAPER}: copy benchmarks/paper there")
    return Path(given)


def files() -> Files:
    return Files("paper", root(), EXPERIMENTS, DATASETS)


def entries(experiment: str, dataset: str, seeds: Iterable[int], *more: Any, **options: Any) -> list[Entry]:
    """All runs of an experiment of the paper on a data set."""
    return sweep.entries(files(), experiment, dataset, seeds, *more, **options)


def grid(method: str) -> list[Setting]:
    return files().grid(method)


@cache
def paper() -> dict[str, Any]:
    """What the paper states, cell by cell."""
    return tomllib.loads((root() / PAPER).read_text("utf-8"))


def stated(experiment: str, cell: str, label: str) -> tuple[float | None, int | None]:
    """The paper's accuracy in % and its training rounds, where it gives them."""
    found = paper().get(experiment, {}).get(cell, {}).get(label)
    if isinstance(found, list):
        return found[0], found[1]
    return found, None
