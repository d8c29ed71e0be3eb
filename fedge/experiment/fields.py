"""The fields of a table, read off the function or dataclass that the table is for."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

from fedge.checks import nearest
from fedge.experiment.errors import ExperimentError
from fedge.experiment.values import Mismatch, complain, convert, expected, is_plain, tabled

Table = dict[str, Any]


class Required:
    """Stands for the default of a field that has none."""


@dataclass(frozen=True)
class Field:
    """A parameter of a function, or a field of a dataclass."""

    name: str
    hint: Any
    default: Any = Required

    @property
    def plain(self) -> bool:
        return is_plain(self.hint)


@cache
def fields_of(thing: Callable[..., Any]) -> dict[str, Field]:
    """Every field by name, with its type and default.

    >>> from fedge.partition import iid
    >>> list(fields_of(iid))
    ['y', 'clients', 'seed']
    """
    hints = get_type_hints(thing)
    if dataclasses.is_dataclass(thing):
        found = {one.name: _default(one) for one in dataclasses.fields(thing) if one.init}
    else:
        found = {one.name: one.default for one in inspect.signature(thing).parameters.values()}
    return {
        name: Field(name, hints.get(name, Any), Required if default is inspect.Parameter.empty else default)
        for name, default in found.items()
    }


def resolve(table: Mapping[str, Any], fields: Iterable[Field], where: str, derived: frozenset[str]) -> Table:
    """The table with every value checked and every default filled in.

    `derived` fields are set elsewhere, from the rest of the experiment.
    """
    fields = list(fields)
    _check_keys(table, fields, where, derived)
    found: Table = {}
    for field in fields:
        if field.name in table:
            found[field.name] = _value(table[field.name], field, where)
        elif field.name not in derived:
            found |= _filled(field, where)
    return found


def check_table(value: Any, where: str) -> Table:
    """A table, not a number or a list."""
    if not isinstance(value, dict):
        raise ExperimentError(f"{where} is {value!r}, expected a table [{where}]")
    return value


def unknown(key: str, known: Iterable[str], where: str, kind: str = "key") -> ExperimentError:
    """The error for a word that is not known: the nearest one, or else all of them."""
    known = list(known)
    close = nearest(key, known)
    return ExperimentError(f"{where}unknown {kind} {key!r}{close or ', known are ' + ', '.join(known)}")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def _check_keys(table: Mapping[str, Any], fields: list[Field], where: str, derived: frozenset[str]) -> None:
    known = [field.name for field in fields if field.plain and field.name not in derived]
    for key in table:
        if key in derived:
            raise ExperimentError(f"{where}: {key} follows from the rest of the experiment: leave it out")
        if key not in known and any(field.name == key for field in fields):
            raise ExperimentError(f"{where}: {key} cannot be written in a file: set it from Python")
        if key not in known:
            raise unknown(key, known, f"{where}: ")


def _value(value: Any, field: Field, where: str) -> Any:
    try:
        return convert(value, field.hint)
    except Mismatch:
        raise ExperimentError(f"{where}: {complain(field.name, value, field.hint)}") from None


def _filled(field: Field, where: str) -> Table:
    """The default, unless it is nothing that a file can hold."""
    if field.default is not Required:
        return {field.name: tabled(field.default)} if field.plain else {}
    if field.plain:
        raise ExperimentError(f"{where}: {field.name} is missing, expected {expected(field.hint)}")
    raise ExperimentError(f"{where}: {field.name} is needed, and cannot be written in a file: use it from Python")
