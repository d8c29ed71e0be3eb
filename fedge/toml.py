"""TOML in and out: nested dicts of numbers, strings, booleans and lists."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

DEEPEST = 50
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def loads(text: str) -> dict[str, Any]:
    """What the standard library reads, without tables in tables without end; errors are TOMLDecodeErrors."""
    try:
        found = tomllib.loads(text)
    except (RecursionError, ValueError) as error:
        if isinstance(error, tomllib.TOMLDecodeError):
            raise
        what = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise tomllib.TOMLDecodeError(what) from None
    level: list[Any] = [found]
    for _ in range(DEEPEST):
        level = [one for thing in level for one in _inside(thing) if isinstance(one, dict | list)]
        if not level:
            return found
    raise tomllib.TOMLDecodeError(f"it is nested more than {DEEPEST} deep")


def _inside(thing: Any) -> Any:
    return thing.values() if isinstance(thing, dict) else thing


def dump(config: Mapping[str, Any]) -> str:
    """The text of a TOML file; None is written as "none", for TOML has no word for it.

    >>> print(dump({"name": "x", "train": {"rounds": 3}}), end="")
    name = "x"
    <BLANKLINE>
    [train]
    rounds = 3
    """
    return "\n".join(_table(config, ())).lstrip("\n") + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"{_key(k)} = {_value(v)}" for k, v in table.items() if not _is_table(v)]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{_dotted((*path, key))}]", *_table(value, (*path, key))]
        elif _is_table(value):
            for one in value:
                lines += ["", f"[[{_dotted((*path, key))}]]", *_table(one, (*path, key))]
    return lines


def _is_table(value: Any) -> bool:
    tables = isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)
    return isinstance(value, Mapping) or tables


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(_key(part) for part in path)


def _value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)  # inf and nan are TOML words too
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, Mapping):  # in a list with other things
        return "{" + ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items()) + "}"
    return _string(str(value))


def _string(text: str) -> str:
    """JSON's escapes are TOML's, but for one control character that JSON lets through."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
