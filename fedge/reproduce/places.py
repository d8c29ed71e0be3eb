"""Where the experiments of the paper lie: in `benchmarks/paper` of a checkout, or inside the installed package.

FEDGE_PAPER names another folder of the same form, for a copy with changes of your own.
"""

from __future__ import annotations

import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from fedge.checks import nearest
from fedge.experiment import ExperimentError

EXPERIMENTS = ("optimisers", "curves", "noniid", "sharing", "clients", "batch-epochs", "clipped")
BEYOND = ("clipped",)  # what the paper does not have
TUNE = "tune"
DATASETS = ("fmnist", "cifar10", "kws")
VARIABLE = "FEDGE_PAPER"
PAPER, GRID = "paper.toml", "grid.toml"
PACKAGE = Path(__file__).resolve().parent


def root() -> Path:
    """The folder with one folder an experiment."""
    if given := os.environ.get(VARIABLE):
        if not (Path(given) / PAPER).is_file():
            raise ExperimentError(f"{VARIABLE} is {given!r}, a folder without {PAPER}: copy benchmarks/paper there")
        return Path(given)
    for folder in (PACKAGE.parents[1] / "benchmarks" / "paper", PACKAGE / "paper"):
        if (folder / PAPER).is_file():
            return folder
    raise ExperimentError(
        "the experiments of the paper are not here: install fedge from its wheel, or run it from a checkout, "
        "where they are in benchmarks/paper"
    )


def files(experiment: str, dataset: str) -> list[Path]:
    """The TOML files of an experiment on a data set: `fmnist.toml`, or one a cell: `fmnist-l2.toml`."""
    check("experiment", experiment, (*EXPERIMENTS, TUNE))
    check("dataset", dataset, DATASETS)
    found = [path for path in (root() / experiment).glob("*.toml") if path.stem.split("-")[0] == dataset]
    return sorted(found, key=lambda path: (len(path.stem), path.stem))


def check(what: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise ExperimentError(f"{what} is {word!r}{nearest(word, known)}, it must be one of {', '.join(known)}")


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
