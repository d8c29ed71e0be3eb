"""The fields of a table, read off the function or dataclass that the table is for."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, get_type_hints

from fedge.checks import nearest
from fedge.experiment.errors import ExperimentError
from fedge.experiment.own import Own, Unread, find
from fedge.experiment.values import Mismatch, complain, convert, expected, is_plain, named, tabled, takes_objects

Table = dict[str, Any]
Plain = bool | int | float | str


class Required:
    """Stands for the default of a field that has none."""


@dataclass(frozen=True)
class Field:
    """A parameter of a function, or a field of a dataclass."""

    name: str
    hint: Any
    default: Any = Required

    @cached_property
    def plain(self) -> bool:
        """Whether a file can spell its values."""
        return is_plain(self.hint)


@cache
def fields_of(thing: Callable[..., Any]) -> dict[str, Field]:
    """Every field by name, with its type and default.

    >>> from fedge.partition import iid
    >>> list(fields_of(iid))
    ['y', 'clients', 'seed']
    """
    if dataclasses.is_dataclass(thing):
        hints = get_type_hints(thing)
        found = {one.name: _default(one) for one in dataclasses.fields(thing) if one.init}
    else:
        every = inspect.signature(thing, eval_str=True).parameters.values()
        named = [one for one in every if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        hints = {one.name: one.annotation for one in named if one.annotation is not one.empty}
        found = {one.name: one.default for one in named}
    return {
        name: Field(name, hints.get(name, _guess(default)), Required if default is inspect.Parameter.empty else default)
        for name, default in found.items()
    }


def _guess(default: Any) -> Any:
    """The type of a parameter that declares none: that of its default, or else anything that a file can hold."""
    if type(default) in (bool, int, float, str):
        return type(default)
    if isinstance(default, list | tuple):
        return list[Plain]
    return Plain | list[Plain] | None if default in (None, inspect.Parameter.empty) else Any


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
    others = f", known are {', '.join(known)}" if known else ", there is nothing to set here: leave it out"
    return ExperimentError(f"{where}unknown {kind} {key!r}{close or others}")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def _check_keys(table: Mapping[str, Any], fields: list[Field], where: str, derived: frozenset[str]) -> None:
    known = [field.name for field in fields if field.plain and field.name not in derived]
    for key in table:
        if key in derived:
            raise ExperimentError(f"{where}: {key} follows from the rest of the experiment: leave it out")
        if key not in known and any(field.name == key for field in fields) and not is_own(table[key]):
            remedy = 'set it from Python, or name a part of your own, "mine.py:thing"'
            raise ExperimentError(f"{where}: {key} cannot be written in a file: {remedy}")
        if not any(field.name == key for field in fields):
            raise unknown(key, known, f"{where}: ")


def is_own(value: Any) -> bool:
    """A part of the user's own: its name, a list of names, or a table with the name and its fields."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(one, Own) for one in value)
    return isinstance(value.get("name") if isinstance(value, Mapping) else value, Own)


def _value(value: Any, field: Field, where: str) -> Any:
    if is_own(value) and takes_objects(field.hint):
        return _own(value, f"{where}: {field.name}")
    try:
        return convert(value, field.hint)
    except Mismatch:
        hint = _as_a_sweep(value, field)
        raise ExperimentError(f"{where}: {complain(field.name, value, field.hint)}{hint}") from None


def _as_a_sweep(value: Any, field: Field) -> str:
    """A list where one value is expected, and each of its values would do: what the user may have meant."""
    if not isinstance(value, list) or not value:
        return ""
    try:
        for one in value:
            convert(one, field.hint)
    except Mismatch:
        return ""
    several = f"seeds = {value}" if field.name == "seed" else f"{field.name} = {{sweep = {value}}}"
    return f"; to run it with each of them, write {several}"


def _own(value: Any, where: str) -> Any:
    """A name alone is the function or class itself; in a table it is called with the other fields of the table."""
    if not isinstance(value, Mapping):
        for one in [value] if isinstance(value, Own) else value:
            find(one, where)
        return value
    thing = find(value["name"], where)
    rest = {key: one for key, one in value.items() if key != "name"}
    fields = [] if thing is Unread else fields_of(thing).values()
    return {"name": value["name"], **(rest if thing is Unread else resolve(rest, fields, where, frozenset()))}


def _filled(field: Field, where: str) -> Table:
    """The default, unless it is nothing that a file can hold, or a function, which is written where it is another."""
    if named(field.hint):
        return {}
    if field.default is not Required:
        return {field.name: tabled(field.default)} if field.plain else {}
    if field.plain:
        raise ExperimentError(f"{where}: {field.name} is missing, expected {expected(field.hint)}")
    raise ExperimentError(f"{where}: {field.name} is needed, and cannot be written in a file: use it from Python")
