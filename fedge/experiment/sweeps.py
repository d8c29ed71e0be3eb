"""Sweeps: a file with lists of values is many ordinary experiments.

    [train]
    seeds = [0, 1, 2]              # one run per seed

    [[algorithm]]
    lr = {sweep = [0.05, 0.1]}     # and per step size: six runs

A field of [data], [partition], [model], [edge] or [train] is swept for all algorithms, one of an algorithm for that
one alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from fedge.experiment.axes import SEEDS, Axis, Choice, axes, choices, is_sweep, listed, sweeps, with_choice, words
from fedge.experiment.errors import ExperimentError
from fedge.experiment.fields import Table, check_table
from fedge.experiment.labels import distinct_labels, place
from fedge.experiment.own import code_of, marked
from fedge.experiment.parsing import Experiment, algorithm_tables, check_names, parse
from fedge.runs.experiments import slug

SHARED = ("data", "partition", "model", "edge", "train")  # tables of all algorithms, what is slow to make again first
SEED = ("train", "seed")
MOST = 10_000  # runs


class SweptRun(NamedTuple):
    """One run of a sweep."""

    experiment: Experiment  # with other algorithms too, perhaps
    label: str  # of its algorithm
    title: str  # with the swept values of the other tables
    folder: str  # its name in the folder of the sweep

    @property
    def config(self) -> Table:
        return self.experiment.config(self.label)


@dataclass(frozen=True)
class Sweep:
    """The experiments of a file: one, or one per combination of what is swept in the tables of all algorithms."""

    tables: Table  # as the file has them, settings in place
    points: tuple[tuple[Experiment, str], ...]  # and what tells each from the others: "alpha=0.1 seed=2"
    swept: bool

    @property
    def first(self) -> Experiment:
        return self.points[0][0]

    @property
    def name(self) -> str:
        return self.first.name

    def table(self) -> Table:
        """What is written into the folder, to go on from."""
        if not self.swept:
            return self.first.table()
        code = code_of(self.tables)
        return {"name": self.name} | self.tables | ({"code": code} if code else {})

    def runs(self) -> list[SweptRun]:
        """Every run, those with the same clients one after another, and among them those of one algorithm."""
        found, taken = list[SweptRun](), dict[str, int]()
        for label, experiment, title in self._titles():
            count = taken[slug(title)] = taken.get(slug(title), 0) + 1
            title = title if count == 1 else f"{title} {count}"
            found.append(SweptRun(experiment, label, title, slug(title)))
        return found

    def _titles(self) -> Iterator[tuple[str, Experiment, str]]:
        for _, group in groupby(self.points, key=lambda point: (point[0].data, point[0].partition)):
            alike = list(group)
            for at, label in enumerate(self.first.labels):
                for experiment, said in alike:
                    yield experiment.labels[at], experiment, f"{label} {said}".strip()


def read_sweep(tables: Mapping[str, Any], name: str = "experiment") -> Sweep:
    """Check everything that can be checked without data, for every run; a file without a list is one experiment."""
    check_names(tables)
    tables = marked(tables)
    if not sweeps(tables):
        return Sweep(dict(tables), ((parse(tables, name), ""),), False)
    for key, value in tables.items():
        if is_sweep(value):
            what = "a table: sweep one of its fields" if key in (*SHARED, "algorithm") else "of the whole sweep"
            raise ExperimentError(f"{key} cannot be swept, it is {what}")
    plain = _with_seed_axis(tables)
    shared = _shared_axes(plain)
    algorithms = [check_table(one, "algorithm") for one in algorithm_tables(plain)]
    own = [list(axes(one, place(at, one))) for at, one in enumerate(algorithms, 1)]
    _check_count(shared, own)
    numbers, expanded = _expanded(algorithms, own)
    points = tuple(_points(plain | {"algorithm": expanded}, shared, own, name, numbers))
    return Sweep(dict(tables), points, True)


def _with_seed_axis(tables: Mapping[str, Any]) -> Table:
    """`seeds = [0, 1]` in [train] is `seed = {sweep = [0, 1]}`."""
    train = check_table(tables.get("train", {}), "train")
    if SEEDS not in train:
        return dict(tables)
    if "seed" in train:
        raise ExperimentError(f"train: seed is {train['seed']!r}, and there are seeds as well: leave one of them out")
    found = listed(train[SEEDS], "train: seeds", "[0, 1, 2]")
    rest = {key: value for key, value in train.items() if key != SEEDS}
    return {**tables, "train": rest | {"seed": {"sweep": list(found)}}}


def _shared_axes(tables: Table) -> list[Axis]:
    """What is swept for all algorithms, the seed last."""
    found = [
        Axis((key, *axis.path), axis.values, axis.follows)
        for key in SHARED
        for axis in axes(check_table(tables.get(key, {}), key), key)
    ]
    return sorted(found, key=lambda axis: axis.path == SEED)


def _check_count(shared: Sequence[Axis], own: Sequence[Sequence[Axis]]) -> None:
    every = [*shared, *(axis for one in own for axis in one)]
    if any(axis.follows for axis in every) and not any(axis.path == SEED for axis in shared):
        name = ".".join(next(axis for axis in every if axis.follows).path)
        raise ExperimentError(f'{name} is {{sweep = "{SEEDS}"}}, and there are no seeds: add seeds to [train]')
    count = _product(shared) * sum(map(_product, own))
    if count > MOST:
        lengths = ", ".join(f"{len(axis.values)} of {'.'.join(axis.path)}" for axis in every if not axis.follows)
        raise ExperimentError(
            f"the sweep has {count:,} runs ({lengths}), at most {MOST:,} are allowed: shorten a list, or write "
            "several files"
        )


def _product(found: Sequence[Axis]) -> int:
    return math.prod(len(axis.values) for axis in found if not axis.follows)


def _expanded(algorithms: Sequence[Table], own: Sequence[Sequence[Axis]]) -> tuple[list[int], list[Table]]:
    """Every algorithm once per combination of its own axes, and its position in the file."""
    numbers, found = list[int](), list[Table]()
    for number, (table, mine) in enumerate(zip(algorithms, own, strict=True), 1):
        for choice in choices(mine):
            label = {"label": f"{table['label']} {words(choice)}"} if choice and "label" in table else {}
            numbers.append(number)
            found.append(with_choice(table, choice) | label)
    followers = [axis for mine in own for axis in mine if axis.follows]
    labels = distinct_labels([with_choice(one, _following(one, followers, 0)) for one in found])
    return numbers, [one | {"label": label} for one, label in zip(found, labels, strict=True)]


def _following(table: Mapping[str, Any], followers: Sequence[Axis], seed: Any) -> Choice:
    """The seed for every field of this table that follows it."""
    there = {axis.path for axis in axes(table, "")}
    return {axis.path: seed for axis in followers if axis.path in there}


def _points(
    tables: Table, shared: Sequence[Axis], own: Sequence[Sequence[Axis]], name: str, numbers: Sequence[int]
) -> Iterator[tuple[Experiment, str]]:
    """Every combination of what is swept for all algorithms, as an experiment and in words."""
    inside = [axis for mine in own for axis in mine if axis.follows]
    for choice in choices(shared):
        seed = choice.get(SEED)
        whole = with_choice(tables, choice | {axis.path: seed for axis in shared if axis.follows})
        whole["algorithm"] = [with_choice(one, _following(one, inside, seed)) for one in whole["algorithm"]]
        yield parse(whole, name, numbers), words(choice)
