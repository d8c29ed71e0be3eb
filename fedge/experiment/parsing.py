"""From the tables of a file to an experiment in which every field is checked and spelt out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedge.checks import brief
from fedge.experiment.axes import sweeps
from fedge.experiment.errors import ExperimentError
from fedge.experiment.fields import Table, check_table, resolve, unknown
from fedge.experiment.fields import fields_of as fields
from fedge.experiment.labels import distinct_labels, place
from fedge.experiment.own import code_of, marked
from fedge.experiment.parts import ALGORITHM, DATA, EDGE, MODEL, PARTITION, TRAIN, wraps
from fedge.runs.experiments import slug


@dataclass(frozen=True)
class Experiment:
    """Algorithms that are compared on one federation. Tables hold every field, defaults included."""

    data: Table
    partition: Table
    model: Table
    train: Table
    algorithm: tuple[Table, ...]
    name: str = "experiment"
    edge: Table | None = None  # devices and a virtual clock; None: neither
    code: Table = field(default_factory=dict)  # the user's files that it names, with place and checksum
    target: float | None = None  # a test accuracy; rounds and MB are counted until it is reached

    @property
    def labels(self) -> list[str]:
        return [table["label"] for table in self.algorithm]

    def table(self) -> Table:
        """The whole experiment, ready to be written and read back."""
        head: Table = {"name": self.name} if self.target is None else {"name": self.name, "target": self.target}
        return head | self._shared() | {"algorithm": list(self.algorithm)}

    def config(self, label: str) -> Table:
        """The experiment of one run: a file with this algorithm alone, that can be run again."""
        return {"name": self.name, **self._shared(), "algorithm": self.algorithm[self.labels.index(label)]}

    def _shared(self) -> Table:
        # `train` before `model`, whose seed follows that of `train`: the first difference is the one somebody made.
        found = {"data": self.data, "partition": self.partition, "train": self.train, "model": self.model}
        found |= {} if self.edge is None else {"edge": self.edge}
        return {"code": self.code} | {key: table for key, table in found.items() if table} if self.code else found


def parse(tables: Mapping[str, Any], name: str = "experiment", numbers: Sequence[int] | None = None) -> Experiment:
    """Check everything that can be checked without data; `name` is for files that give none.

    `numbers` are the positions that errors call the algorithms by, where those of a sweep stand for one of a file.
    """
    check_names(tables)
    tables = marked(tables)
    if sweeps(tables):
        raise ExperimentError(
            "the file is a sweep, one experiment is needed here: use it with fedge run, or keep one value per field"
        )
    train = TRAIN.resolve({"device": "auto"} | _table(tables, "train"), "train")
    model = {"seed": train["seed"]} | MODEL.resolve(_table(tables, "model"), "model")
    data, partition = _federation(tables)
    return Experiment(
        data=data,
        partition=partition,
        model={"name": model.pop("name"), **model},
        train=train,
        algorithm=_algorithms(tables, numbers),
        edge=EDGE.resolve(_table(tables, "edge"), "edge") if "edge" in tables else None,
        code=code_of(tables),
        **_head(tables, name),
    )


def federation_of(tables: Mapping[str, Any]) -> tuple[Table, Table]:
    """Only the data and the partition of a file, which may have nothing else."""
    check_names(tables)
    return _federation(marked(tables))


def _federation(tables: Mapping[str, Any]) -> tuple[Table, Table]:
    """Own data may come with their clients: then there is no table [partition], or an empty one."""
    data, partition = _table(tables, "data"), _table(tables, "partition")
    dealt = {} if brings_clients(tables) else PARTITION.resolve(partition, "partition")
    return DATA.resolve(data, "data"), dealt


def brings_clients(tables: Mapping[str, Any]) -> bool:
    """Whether the data are the user's own, without a partition."""
    return not _table(tables, "partition") and DATA.own_key(_table(tables, "data")) is not None


def check_names(tables: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(Experiment)]
    for key, value in tables.items():
        if key not in known:
            raise unknown(key, known, "", "table" if isinstance(value, dict | list) else "key")


def algorithm_tables(tables: Mapping[str, Any]) -> list[Table]:
    """[[algorithm]] several times, or one [algorithm]."""
    found = tables.get("algorithm", [])
    found = [found] if isinstance(found, dict) else found
    if not found:
        raise ExperimentError("algorithm is missing: add a table [[algorithm]] with a name")
    if not isinstance(found, list):
        raise ExperimentError(f"algorithm is {found!r}, expected a table [[algorithm]] with a name")
    return [check_table(one, "algorithm") for one in found]


def _table(tables: Mapping[str, Any], key: str) -> Table:
    return check_table(tables.get(key, {}), key)


def _head(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`name` and `target`, the fields that belong to no table."""
    head = [field for field in fields(Experiment).values() if field.name in ("name", "target")]
    given = {field.name: tables[field.name] for field in head if field.name in tables}
    found = resolve({"name": name} | given, head, "the head of the file", frozenset())
    if not slug(found["name"]):
        raise ExperimentError(f"name is {found['name']!r}, it must have a letter or a digit: it names the run folder")
    if not found["name"].isprintable():
        raise ExperimentError(f"name is {found['name']!r}, leave out what is no letter, digit, sign or space")
    target = found["target"]
    if target is not None and not 0 < target <= 1:
        raise ExperimentError(f"target is {brief(target)}, it must be above 0 and at most 1: write 0.85 for 85 %")
    return found


def _algorithms(tables: Mapping[str, Any], numbers: Sequence[int] | None) -> tuple[Table, ...]:
    found = algorithm_tables(tables)
    labels = distinct_labels(found)
    places = zip(numbers or range(1, len(found) + 1), found, strict=True)
    resolved = [_algorithm(one, place(at, one), ("label",)) for at, one in places]
    return tuple({"name": one.pop("name"), "label": label, **one} for one, label in zip(resolved, labels, strict=True))


def _algorithm(table: Table, where: str, besides: Sequence[str] = (), path: str = "algorithm") -> Table:
    """One algorithm and, if it wraps another, that one too, to any depth."""
    inner = table.get("inner")
    rest = {key: value for key, value in table.items() if key not in ("inner", *besides)}
    if not wraps(ALGORITHM.chosen(table, where), table):
        found = ALGORITHM.resolve(rest, where)
        if inner is not None:
            raise ExperimentError(f"{where}: it wraps no other algorithm: leave out inner")
        return found
    if not isinstance(inner, dict):
        raise ExperimentError(f"{where}: it wraps another algorithm: add a table [{path}.inner] with a name")
    _check_level(rest, inner, where, path)
    within = {"inner": _algorithm(inner, inside(where, inner), path=f"{path}.inner")}
    return ALGORITHM.resolve(rest, where) | within


def _check_level(table: Mapping[str, Any], inner: Any, where: str, path: str) -> None:
    """Refuse a field of a wrapped algorithm that was given to the one around it."""
    own = ALGORITHM.fields(table, where).keys() | {ALGORITHM.key}
    while isinstance(inner, dict) and ALGORITHM.knows(inner):
        path = f"{path}.inner"
        there = [one.name for one in ALGORITHM.fields(inner, where).values() if ALGORITHM.writable(one)]
        for key in table:
            if key not in own and key in there:
                raise ExperimentError(f"{where}: {key} is a field of {inner['name']}: write it in [{path}]")
        inner = inner.get("inner")


def inside(where: str, inner: Mapping[str, Any]) -> str:
    return f"{where}, inner ({inner['name']})" if "name" in inner else f"{where}, inner"
