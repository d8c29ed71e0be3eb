"""The TOML files of a sweep: one folder per experiment, in it one file per data set or cell; and the grids of tuning.

noniid/fmnist-l2.toml    the cell `fmnist-l2` of the experiment `noniid`, on the data set `fmnist`
tune/fmnist-iid.toml     what is tuned on `fmnist`, on a held-out part of its training set
grid.toml                the settings that are tried, one table per method
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fedge import toml
from fedge.checks import nearest
from fedge.experiment import ExperimentError

TUNE, GRID = "tune", "grid.toml"
MOST = 8  # settings per method

Setting = dict[str, Any]


@dataclass(frozen=True)
class Files:
    """Where they are, and which experiments and data sets there may be."""

    name: str  # of every run
    root: Path
    experiments: tuple[str, ...]
    datasets: tuple[str, ...]

    def of(self, experiment: str, dataset: str) -> list[Path]:
        """The files of an experiment on a data set: `fmnist.toml`, or one per cell: `fmnist-l2.toml`."""
        check("experiment", experiment, (*self.experiments, TUNE))
        check("dataset", dataset, self.datasets)
        found = [path for path in (self.root / experiment).glob("*.toml") if path.stem.split("-")[0] == dataset]
        return sorted(found, key=lambda path: (len(path.stem), path.stem))

    def grids(self) -> dict[str, dict[str, list[Any]]]:
        """Method -> field -> values to try."""
        return toml.loads((self.root / GRID).read_text("utf-8"))

    def grid(self, method: str) -> list[Setting]:
        """The settings that are tried for a method: every combination of its lists."""
        axes = self.grids().get(method)
        if axes is None:
            raise ExperimentError(f"{GRID} has no settings for {method!r}: add a table with its name")
        found = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
        if len(found) > MOST:
            raise ExperimentError(f"{GRID} has {len(found)} settings for {method!r}, at most {MOST} are tried")
        return found


def check(what: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise ExperimentError(f"{what} is {word!r}{nearest(word, known)}, it must be one of {', '.join(known)}")


def scope(cell: str) -> str:
    """What a tuning is for: a data set if it ends in `-iid` or `-noniid`, or else a cell, such as `fmnist-k1000`."""
    dataset, *rest = cell.split("-")
    return dataset if rest and rest[-1] in ("iid", "noniid") else cell
