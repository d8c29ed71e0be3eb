"""The tables of an experiment file, and what each of them is for."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from fedge import partition
from fedge.algorithms import ALGORITHMS, ASYNCHRONOUS
from fedge.checks import choice
from fedge.core import Algorithm
from fedge.data import Data, load
from fedge.edge.settings import Edge
from fedge.experiment.errors import ExperimentError
from fedge.experiment.fields import Field, Required, Table, fields_of, resolve
from fedge.experiment.own import Own, Unread, find
from fedge.experiment.training import Training
from fedge.models import MODELS
from fedge.partition.owners import Owned


def by_owner(data: Data) -> Owned:
    """`by_group` of a file: one client per owner, where the data say whose each training example is."""
    if not data.owners:
        raise ValueError("by_group makes one client per owner, and these data do not say whose each example is")
    return partition.by_group(data.owners)


PARTITIONS: dict[str, Callable[..., Any]] = {name: getattr(partition, name) for name in partition.__all__}
PARTITIONS["by_group"] = by_owner


@dataclass(frozen=True)
class Part:
    """A table whose `key` chooses among functions or classes, and whose other fields are those of the chosen one."""

    choices: Mapping[str, Callable[..., Any]]
    key: str | None = None  # None: there is nothing to choose
    derived: frozenset[str] = frozenset()  # what the experiment sets by itself
    open: frozenset[str] = frozenset()  # what it sets by itself unless the table says otherwise
    own: Callable[[Any, str], None] | None = None  # refuses what a user's part must not be; None: there is none

    def own_key(self, table: Mapping[str, Any]) -> str | None:
        """The key that names a part of the user's own, if the table has one."""
        key = self.key or "name"
        return key if self.own is not None and isinstance(table.get(key), Own) else None

    def chosen(self, table: Mapping[str, Any], where: str) -> Callable[..., Any]:
        if (key := self.own_key(table)) is not None and self.own is not None:
            found: Callable[..., Any] = find(table[key], where)
            if found is not Unread:
                self.own(found, f"{where}: {table[key]}")
            return found
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
        """The choices that a file can use, without those that need what it cannot hold."""
        return [name for name, made in self.choices.items() if all(map(self._spelt, fields_of(made).values()))]

    def _spelt(self, field: Field) -> bool:
        return field.plain or field.default is not Required or field.name in self.derived

    def writable(self, field: Field) -> bool:
        """Whether a file may set this field."""
        return field.plain and field.name not in self.derived

    def knows(self, table: Mapping[str, Any]) -> bool:
        """Whether the table names one of the choices, or a part of the user's own."""
        return self.own_key(table) is not None or (self.key is not None and table.get(self.key) in [*self.choices])

    def fields(self, table: Mapping[str, Any], where: str) -> dict[str, Field]:
        found = self.chosen(table, where)
        return {key: Field(key, Any) for key in table} if found is Unread else dict(fields_of(found))

    def resolve(self, table: Mapping[str, Any], where: str) -> Table:
        if self.chosen(table, where) is Unread:
            return dict(table)
        key = self.own_key(table) or self.key
        fields = self.fields(table, where) | self._beside(table)
        wanted = [one for one in fields.values() if one.name in table or one.name not in self.open]
        rest = {name: value for name, value in table.items() if name != key}
        head = {} if key is None else {key: table[key]}
        return head | resolve(rest, wanted, where, self.derived)

    def _beside(self, table: Mapping[str, Any]) -> dict[str, Field]:
        """A model of the user's own may have a seed that it does not take: its first weights are drawn from it."""
        return {"seed": Field("seed", int)} if self is MODEL and self.own_key(table) is not None else {}


def _any(found: Any, what: str) -> None:
    """Any function or class: what it returns is looked at when it is called."""


def _algorithm(found: Any, what: str) -> None:
    if not (isinstance(found, type) and issubclass(found, Algorithm) and is_dataclass(found)):
        kind = "class" if isinstance(found, type) else type(found).__name__
        raise ExperimentError(f"{what} is a {kind}, expected a dataclass derived from fedge.Algorithm")


DATA = Part({"load": load}, own=_any)
PARTITION = Part(PARTITIONS, "kind", frozenset({"y", "data"}), own=_any)
MODEL = Part(MODELS, "name", frozenset({"inputs", "outputs"}), frozenset({"seed"}), own=_any)
TRAIN = Part({"train": Training}, None, frozenset({"algorithm", "federation", "out", "resume", "name"}))
CHOICES: Any = ChainMap[str, Any](ASYNCHRONOUS, ALGORITHMS)  # a view, in which the last come first: names may be added
ALGORITHM = Part(
    CHOICES,
    "name",
    frozenset({"model", "inner"}),
    frozenset({"classes", "clients", "expected", "seed"}),
    own=_algorithm,
)
EDGE = Part({"edge": Edge})
PARTS = {"data": DATA, "partition": PARTITION, "model": MODEL, "train": TRAIN, "edge": EDGE, "algorithm": ALGORITHM}


def wraps(algorithm: Callable[..., Any], table: Mapping[str, Any]) -> bool:
    """Whether this class takes another algorithm, its first field `inner`, in place of a model."""
    if algorithm is Unread:
        return "inner" in table
    return next(iter(fields_of(algorithm)), None) == "inner"
