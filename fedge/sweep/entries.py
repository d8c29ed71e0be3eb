"""The runs that an experiment consists of: one algorithm, one seed, one configuration each."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fedge.experiment import parse
from fedge.experiment.fields import Table
from fedge.experiment.parsing import algorithm_tables
from fedge.experiment.planning import read
from fedge.runs.differences import does_nothing
from fedge.sweep.files import Files, Setting

Chosen = Callable[[str, str], Setting]  # (cell, method) -> what to set
Made = Callable[..., list["Entry"]]  # of_file for one file: takes a seed and what was chosen
Ranked = Callable[[str, str], Sequence[Setting]]  # the same, the best first; empty where nothing was tuned
RANKS = 4  # settings of a method that are tried at most, when the ones before diverged
SEEDLESS = ("by_group",)  # partitions that draw nothing
NOT_THE_RESULT = {  # fields that leave the numbers alone, but for rounding
    "train": ("device", "checkpoint_every", "precision", "compile", "chunk", "workers", "way"), "data": ("path",),
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One run. Two entries with the same key are the same run, whichever table they are for."""

    experiment: str
    cell: str
    label: str
    seed: int
    config: Table  # with this algorithm alone; can be run again with `fedge run`
    planned: int = 0  # rounds in the file; the run may be shorter
    rank: int | None = None  # which choice of the tuning it uses, not 0 if that diverged; None: it was not tuned
    instead_of: str = ""  # the key of the same run with the choice before it, which this one supersedes

    @property
    def dataset(self) -> str:
        return self.cell.split("-")[0]

    @property
    def method(self) -> str:
        """What was tuned: `FedOVA` for `FedOVA, B = 50`."""
        return self.label.split(",")[0]

    @property
    def rounds(self) -> int:
        return int(self.config["train"]["rounds"])

    @property
    def key(self) -> str:
        plain = {**self.config, "algorithm": as_before(self.config["algorithm"])}
        plain["model"] = {name: value for name, value in plain["model"].items() if not does_nothing(name, value)}
        for table, names in NOT_THE_RESULT.items():
            plain[table] = {
                name: value
                for name, value in plain[table].items()
                if name not in names and not does_nothing(name, value)
            }
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def cut(self) -> str:
        """Says how short it is, if it is shorter than in the file."""
        return f"{self.rounds} of {self.planned} rounds" if self.rounds < self.planned else ""

    def __str__(self) -> str:
        return f"{self.experiment} {self.cell}, {self.label}, seed {self.seed}"


def entries(
    files: Files,
    experiment: str,
    dataset: str,
    seeds: Iterable[int],
    rounds: int | None = None,
    ranked: Ranked | None = None,
    diverged: Callable[[str], bool] = lambda key: False,
) -> list[Entry]:
    """All runs of an experiment on a data set, cell by cell, every method with what tuning chose for it.

    A setting with which any seed's run `diverged` (by its key) is replaced by the next best, for all seeds of the cell.
    """
    seeds = list(seeds)
    found: list[Entry] = []
    for file in files.of(experiment, dataset):
        made = partial(of_file, files.name, experiment, file, rounds=rounds)
        columns = [_settled(made, seeds, ranked, diverged, position) for position in range(_methods(file))]
        found += [entry for row in zip(*columns, strict=True) for entry in row]
    return found


def _methods(file: Path) -> int:
    return len(list(algorithm_tables(read(file))))


def _settled(
    made: Made, seeds: list[int], ranked: Ranked | None, diverged: Callable[[str], bool], position: int
) -> list[Entry]:
    """The runs of one method of a file, one per seed, with the best setting that no seed diverged with; or the best.

    The choice before the first one is that of the whole data set, where the cell has its own.
    """
    tried: list[list[Entry]] = []
    for rank in range(RANKS):

        def chosen(cell: str, method: str, rank: int = rank) -> Setting:
            settings = ranked(cell, method) if ranked else []
            return settings[min(rank, len(settings) - 1)] if settings else {}

        runs = [made(seed=seed, chosen=chosen)[position] for seed in seeds]
        if tried and runs[0].key == tried[-1][0].key:  # there are no more settings
            break
        tuned = ranked is not None and bool(ranked(runs[0].cell, runs[0].method)) if runs else False
        before = tried[-1] if tried else _as_elsewhere(made, runs, ranked, position)
        tried.append(
            [
                replace(entry, rank=rank if tuned else None, instead_of=old.key if old.key != entry.key else "")
                for entry, old in zip(runs, before, strict=True)
            ]
        )
        if not any(diverged(entry.key) for entry in runs):
            return tried[-1]
    return tried[0]


def _as_elsewhere(made: Made, runs: list[Entry], ranked: Ranked | None, position: int) -> list[Entry]:
    """The same runs with what was chosen for the whole data set; mostly that is what they have."""
    if not runs or ranked is None:
        return runs
    entry, method = runs[0], runs[0].method
    shared = ranked(entry.dataset, method)[:1]
    if not shared or shared == ranked(entry.cell, method)[:1]:
        return runs
    return [made(seed=one.seed, chosen=lambda *_: shared[0])[position] for one in runs]


def of_file(
    name: str, experiment: str, file: Path, seed: int, rounds: int | None = None, chosen: Chosen | None = None
) -> list[Entry]:
    """The runs of one file with one seed: that of the partition (if it draws), of the model and of the training."""
    tables = copy.deepcopy(read(file))
    planned = tables.get("train", {}).get("rounds")
    tables.setdefault("train", {})["seed"] = seed
    if tables.setdefault("partition", {}).get("kind") not in SEEDLESS:
        tables["partition"]["seed"] = seed
    if rounds is not None:
        tables["train"]["rounds"] = rounds
    for table in algorithm_tables(tables):
        method = str(table.get("label", "")).split(",")[0]
        innermost(table).update(chosen(file.stem, method) if chosen else {})
    whole = parse(tables, file.stem)
    configs = {label: _neutral(name, whole.config(label)) for label in whole.labels}
    return [
        Entry(experiment, file.stem, label, seed, config, planned or config["train"]["rounds"])
        for label, config in configs.items()
    ]


def with_setting(entry: Entry, setting: Setting) -> Entry:
    """The same run with another step size and the like."""
    config = copy.deepcopy(entry.config)
    innermost(config["algorithm"]).update(setting)
    return replace(entry, config=config)


def as_before(algorithm: Table) -> Table:
    """An algorithm, and those inside it, without later fields that do nothing: its runs keep their names."""
    inner = {"inner": as_before(algorithm["inner"])} if isinstance(algorithm.get("inner"), dict) else {}
    return {name: value for name, value in algorithm.items() if not does_nothing(name, value)} | inner


def innermost(table: Table) -> Table:
    """The algorithm inside all wrappers: the one with the step size."""
    while isinstance(table.get("inner"), dict):
        table = table["inner"]
    return table


def step_of(algorithm: Table) -> str:
    """The size of a local step, in words."""
    inner = innermost(algorithm)
    name = "local_lr" if "local_lr" in inner else "lr"
    return f"{name} {inner[name]:g}"


def _neutral(name: str, config: Table) -> Table:
    """Without the texts that differ between two tables with the same run, as plain JSON."""
    algorithm = {**config["algorithm"], "label": config["algorithm"]["name"]}
    plain: Table = json.loads(json.dumps({**config, "name": name, "algorithm": algorithm}))
    return plain
