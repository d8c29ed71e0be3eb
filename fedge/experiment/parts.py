"""The tables of an experiment file, and what each of them is for."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedge import partition
from fedge.algorithms import ALGORITHMS, ASYNCHRONOUS
from fedge.checks import choice
from fedge.data import load
from fedge.edge.settings import Edge
from fedge.experiment.errors import ExperimentError
from fedge.experiment.fields import Field, Required, Table, fields_of, resolve
from fedge.experiment.training import Training
from fedge.models import MODELS

PARTITIONS: dict[str, Callable[..., Any]] = {name: getattr(partition, name) for name in partition.__all__}


@dataclass(frozen=True)
class Part:
    """A table whose `key` chooses among functions or classes, and whose other fields are those of the chosen one."""

    choices: Mapping[str, Callable[..., Any]]
    key: str | None = None  # None: there is nothing to choose
    derived: frozenset[str] = frozenset()  # what the experiment sets by itself
    open: frozenset[str] = frozenset()  # what it sets by itself unless the table says otherwise

    def chosen(self, table: Mapping[str, Any], where: str) -> Callable[..., Any]:
        if self.key is None:
            return next(iter(self.choices.values()))
        if self.key not in table:
            raise ExperimentError(f"{where}: {self.key} is missing, expected one of {', '.join(self.offered)}")
        chosen = table[self.key]
        if isinstance(chosen, str) and chosen in self.choices:
            return self.choices[chosen]
        try:
            choice(self.key, chosen, self.offered)
        except ValueError as error:
            raise ExperimentError(f"{where}: {error}") from None
        raise AssertionError  # what is offered is among the choices

    @property
    def offered(self) -> list[str]:
        """The choices that a file can use: `by_group` needs an array."""
        return [name for name, made in self.choices.items() if all(map(self._spelt, fields_of(made).values()))]

    def _spelt(self, field: Field) -> bool:
        return field.plain or field.default is not Required or field.name in self.derived

    def writable(self, field: Field) -> bool:
        """Whether a file may set this field."""
        return field.plain and field.name not in self.derived

    def fields(self, table: Mapping[str, Any], where: str) -> dict[str, Field]:
        return fields_of(self.chosen(table, where))

    def resolve(self, table: Mapping[str, Any], where: str) -> Table:
        fields = [f for f in self.fields(table, where).values() if f.name in table or f.name not in self.open]
        rest = {key: value for key, value in table.items() if key != self.key}
        head = {} if self.key is None else {self.key: table[self.key]}
        return head | resolve(rest, fields, where, self.derived)


DATA = Part({"load": load})
PARTITION = Part(PARTITIONS, "kind", frozenset({"y"}))
MODEL = Part(MODELS, "name", frozenset({"inputs", "outputs"}), frozenset({"seed"}))
TRAIN = Part({"train": Training}, None, frozenset({"algorithm", "federation", "out", "resume", "name"}))
CHOICES: Any = ChainMap[str, Any](ASYNCHRONOUS, ALGORITHMS)  # a view, in which the last come first: names may be added
ALGORITHM = Part(CHOICES, "name", frozenset({"model", "inner"}), frozenset({"classes", "clients", "expected"}))
EDGE = Part({"edge": Edge})
PARTS = {"data": DATA, "partition": PARTITION, "model": MODEL, "train": TRAIN, "edge": EDGE, "algorithm": ALGORITHM}


def wraps(algorithm: Callable[..., Any]) -> bool:
    """Whether this class takes another algorithm, its first field `inner`, in place of a model."""
    return next(iter(fields_of(algorithm)), None) == "inner"
