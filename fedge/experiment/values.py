"""Values as TOML has them, checked against the types that Python functions and dataclasses declare."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from fedge.algorithms.optimisers import Optimiser
from fedge.checks import guess, nearest
from fedge.core import Codec, Combine, Loss
from fedge.experiment.own import Own, find
from fedge.losses import LOSSES
from fedge.metrics import METRICS, Metric

NONE = "none"  # TOML has no null
SINGULAR = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
PLURAL = {bool: "true or false", int: "whole numbers", float: "numbers", str: "strings"}
AS_STRING = (torch.device, Path)  # written as a string, and a declared type next to it
OPEN = (Codec, Combine, Optimiser)  # your own ones come from Python; those next to them can be written as tables
LISTS = (list, tuple, Sequence)
BY_NAME: list[tuple[Any, dict[str, Any]]] = [(Loss, LOSSES), (Metric, METRICS)]  # functions: ours by name, or own ones


class Mismatch(Exception):
    """A value that is not of the type it should be."""


@cache
def declared(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields, worked out once: a sweep parses thousands of tables."""
    return get_type_hints(kind)


def is_plain(hint: Any) -> bool:
    """Whether a TOML file can spell values of this type."""
    if named(hint):
        return True
    if _is_union(hint):
        members = [member for member in _members(hint) if member not in (*AS_STRING, *OPEN)]
        return bool(members) and all(map(is_plain, members))
    if get_origin(hint) in LISTS:
        return all(is_plain(item) for item in get_args(hint) if item is not ...)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = declared(hint)
        return all(is_plain(hints[one.name]) for one in dataclasses.fields(hint))
    return get_origin(hint) is Literal or hint in SINGULAR


def takes_objects(hint: Any) -> bool:
    """Whether values of this type may be functions or objects, which an own part can be."""
    return not is_plain(hint) or named(hint) or any(member in OPEN for member in _members(hint))


def named(hint: Any) -> bool:
    """Whether values of this type are functions that have names, or lists of such."""
    return known_by(hint) is not None or (get_origin(hint) in LISTS and named(get_args(hint)[0]))


def known_by(hint: Any) -> dict[str, Any] | None:
    """The functions of a type by name."""
    return next((table for kind, table in BY_NAME if kind == hint), None)


def convert(value: Any, hint: Any) -> Any:
    """The value as its declared type, or `Mismatch`. A whole number is fine for a float, true is not for an int.

    >>> convert([0.9, 1], tuple[float, float])
    (0.9, 1)
    """
    if (table := known_by(hint)) is not None:
        if isinstance(value, Own) or (isinstance(value, str) and value in table):
            return value
        raise Mismatch
    value = str(value) if isinstance(value, Own) else value
    if _is_union(hint):
        return _convert_union(value, hint)
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
    elif get_origin(hint) in LISTS:
        return _convert_list(value, hint)
    elif dataclasses.is_dataclass(hint):
        return _convert_table(value, hint)
    elif hint is float and type(value) is int:
        return _in_range(value)
    elif type(value) is hint:
        return value
    raise Mismatch


def _in_range(value: int) -> int | float:
    """A whole number for a float; torch takes none of 2^63 and more, so that a large one becomes a float."""
    try:
        return value if abs(value) <= 1 << 53 else float(value)
    except OverflowError:  # the field says what its limit is
        return value


def complain(name: str, value: Any, hint: Any) -> str:
    """The field, the value, and what is expected; of a table whose name is known, what is wrong inside."""
    kinds = {_spelt(kind): kind for kind in _members(hint) if dataclasses.is_dataclass(kind)}
    if isinstance(value, dict) and kinds:
        if (kind := kinds.get(str(value.get("name")))) is None:
            known = ", ".join(kinds)
            return f"{name}.name is {value.get('name')!r}{nearest(value.get('name'), kinds)}, known are {known}"
        return f"{name}: {_inside(value, kind)}"
    words = [word for member in _members(hint) if get_origin(member) is Literal for word in get_args(member)]
    words += known_by(hint) or ()
    wrong = next((one for one in value if one not in words), value) if isinstance(value, list | tuple) else value
    return f"{name} is {value!r}{guess(wrong, words)}, expected {expected(hint)}"


def _inside(table: dict[str, Any], kind: Any) -> str:
    """What is wrong with the fields of a table."""
    hints = declared(kind)
    known = [one.name for one in dataclasses.fields(kind)]
    for key, value in table.items():
        if key != "name" and key not in known:
            return f"unknown key {key!r}{nearest(key, known) or ', known are ' + (', '.join(known) or 'none')}"
        if key != "name":
            try:
                convert(value, hints[key])
            except Mismatch:
                return complain(key, value, hints[key])
    if missing := next((one.name for one in dataclasses.fields(kind) if _is_needed(one) and one.name not in table), ""):
        return f"{missing} is missing, expected {expected(hints[missing])}{_example(kind)}"
    return f"{table!r} cannot be used"


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _example(kind: Any) -> str:
    """A table with all that it needs, if its fields have examples."""
    needed = [one for one in dataclasses.fields(kind) if _is_needed(one)]
    if not all("example" in one.metadata for one in needed):
        return ""
    fields = "".join(f", {one.name} = {one.metadata['example']}" for one in needed)
    return f', as in {{name = "{_spelt(kind)}"{fields}}}'


def expected(hint: Any) -> str:
    """The type in words.

    >>> expected(int | None)
    'a whole number or "none"'
    """
    if (table := known_by(hint)) is not None:
        return "one of " + ", ".join(map(repr, table)) + ' or "mine.py:function"'
    if _is_union(hint):
        words = [expected(member) for member in _members(hint) if is_plain(member)]
        return " or ".join([*words, f'"{NONE}"'] if types.NoneType in get_args(hint) else words)
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(word) for word in get_args(hint))
    if get_origin(hint) in LISTS:
        items = get_args(hint)
        if get_origin(items[0]) is Literal and not _is_fixed(hint):
            some = ", ".join(f'"{word}"' for word in get_args(items[0])[-2:])
            return f"a list such as [{some}]"
        count = f"{len(items)} " if _is_fixed(hint) else ""
        return f"a list of {count}{PLURAL.get(items[0], expected(items[0]))}"
    if dataclasses.is_dataclass(hint):
        names = [one.name for one in dataclasses.fields(hint)]
        return f"a table {{name = {_spelt(hint)!r}{', ' + ', '.join(names) if names else ''}}}"
    return SINGULAR.get(hint, str(hint))


def made(value: Any, hint: Any) -> Any:
    """A converted value as what it stands for: a table as an object of the class that its name chooses."""
    if isinstance(value, Own):
        return find(value, "an own part")
    if isinstance(value, dict) and isinstance(value.get("name"), Own):
        return find(value["name"], "an own part")(**{key: one for key, one in value.items() if key != "name"})
    if (table := known_by(hint)) is not None and isinstance(value, str):
        return table[value]
    kinds = [member for member in _members(hint) if dataclasses.is_dataclass(member)]
    for kind in kinds if isinstance(value, dict) else ():
        if value["name"] == _spelt(kind):
            return kind(**{key: one for key, one in value.items() if key != "name"})  # type: ignore[operator]
    return value


def tabled(value: Any) -> Any:
    """An object that a table stands for, as that table; anything else as it is."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    return {"name": _spelt(type(value)), **{one.name: getattr(value, one.name) for one in dataclasses.fields(value)}}


def _spelt(kind: Any) -> str:
    """A class's name as tables have it: TopK is top_k."""
    name: str = kind.__name__
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _convert_table(value: Any, hint: Any) -> Any:
    """{name = "spectral", momentum = 0.9}: the name of a dataclass and its fields, with the defaults there are."""
    hints = declared(hint)
    fields = {one.name: one.default for one in dataclasses.fields(hint)}
    if not isinstance(value, dict) or value.get("name") != _spelt(hint) or value.keys() - fields.keys() - {"name"}:
        raise Mismatch
    if any(_is_needed(one) and one.name not in value for one in dataclasses.fields(hint)):
        raise Mismatch
    given = {key: convert(one, hints[key]) for key, one in value.items() if key != "name"}
    return {"name": value["name"], **fields, **given}


def _convert_union(value: Any, hint: Any) -> Any:
    if types.NoneType in get_args(hint) and (value is None or value == NONE):
        return None
    for member in filter(is_plain, _members(hint)):
        try:
            return convert(value, member)
        except Mismatch:
            continue
    raise Mismatch


def _convert_list(value: Any, hint: Any) -> Any:
    items = get_args(hint)
    if not isinstance(value, list | tuple) or (_is_fixed(hint) and len(value) != len(items)):
        raise Mismatch
    kinds = items if _is_fixed(hint) else [items[0]] * len(value)
    found = [convert(one, kind) for one, kind in zip(value, kinds, strict=True)]
    return found if get_origin(hint) is list else tuple(found)


def _is_fixed(hint: Any) -> bool:
    """tuple[float, float], but not tuple[float, ...]."""
    return get_origin(hint) is tuple and ... not in get_args(hint)


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _members(hint: Any) -> tuple[Any, ...]:
    found = get_args(hint) if _is_union(hint) else (hint,)
    return tuple(member for member in found if member is not types.NoneType)
