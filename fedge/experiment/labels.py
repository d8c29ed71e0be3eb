"""Labels of algorithms: what a file says, or else the name and what tells it from others of that name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedge.experiment.errors import ExperimentError
from fedge.experiment.fields import Required, Table
from fedge.experiment.own import Own
from fedge.experiment.parts import ALGORITHM
from fedge.experiment.values import NONE
from fedge.runs.experiments import slug


def place(position: int, table: Mapping[str, Any]) -> str:
    """Where an algorithm stands, as errors name it; positions count from 1."""
    return f"algorithm {position} ({table['name']})" if "name" in table else f"algorithm {position}"


def distinct_labels(tables: Sequence[Table]) -> list[str]:
    """Labels that stay different as folder names: `fedavg lr=0.1` and `fedavg lr=0.5`; a second `X` is `X 2`."""
    labels, taken = list[str](), set[str]()
    differences = _differences(tables)
    for position, table in enumerate(tables, 1):
        wanted = table.get("label", _called(table.get("name", "")))
        if not isinstance(wanted, str) or (table.get("label") is not None and not slug(wanted)):
            where = place(position, table)
            raise ExperimentError(f"{where}: label is {wanted!r}, expected a string with a letter or a digit")
        whole = wanted + differences.get(position, "")
        if not whole.isprintable():  # a terminal would act on it
            where = place(position, {})
            raise ExperimentError(f"{where}: label is {whole!r}, leave out what is no letter, digit, sign or space")
        labels.append(_free(whole, taken))
    return labels


def _differences(tables: Sequence[Table]) -> dict[int, str]:
    """What tells the tables of one name apart, by position, for those without a label."""
    groups: dict[Any, dict[int, Table]] = {}
    for position, table in enumerate(tables, 1):
        if "label" not in table and isinstance(table.get("name"), str):
            groups.setdefault(table["name"], {})[position] = _flatten(table)
    return {position: text for group in groups.values() for position, text in _difference(group).items()}


def _difference(group: Mapping[int, Table]) -> dict[int, str]:
    """` lr=0.5`: the first field in which the tables of one name differ, and more while they leave some alike."""
    words = dict.fromkeys(group, "")
    alike: dict[int, tuple[str, ...]] = dict.fromkeys(group, ())  # equal for those that are told apart by nothing yet
    for key in dict.fromkeys(key for one in group.values() for key in one):
        seen: dict[tuple[str, ...], set[str]] = {}
        for position, table in group.items():
            seen.setdefault(alike[position], set()).add(repr(table.get(key)))
        for position, table in group.items():
            if len(seen[alike[position]]) > 1:
                words[position] += f" {_short(key)}={_text(table.get(key))}"
                alike[position] = (*alike[position], key, repr(table.get(key)))
    return words


def _flatten(table: Table, prefix: str = "") -> Table:
    """What a table says, defaults filled in, with the fields of an inner algorithm after its own."""
    flat = {f"{prefix}name": table.get("name")} | {f"{prefix}{key}": value for key, value in _fields(table).items()}
    inner = table.get("inner")
    return flat | (_flatten(inner, f"{prefix}inner.") if isinstance(inner, dict) else {})


def _fields(table: Table) -> Table:
    name = table.get("name")
    known = ALGORITHM.fields(table, "algorithm") if isinstance(name, str) and ALGORITHM.knows(table) else {}
    defaults = {key: one.default for key, one in known.items() if one.plain and one.default is not Required}
    return defaults | {key: value for key, value in table.items() if key not in ("name", "inner", "label")}


def _called(name: Any) -> Any:
    """`FedNova` for the user's own mine.py:FedNova."""
    return name.thing if isinstance(name, Own) else name


def _short(key: str) -> str:
    """`inner.lr` is `lr`, and `inner.name` is `inner`."""
    return key.removesuffix(".name").rsplit(".", 1)[-1]


def _text(value: Any) -> str:
    return NONE if value is None else str(value)


def _free(label: str, taken: set[str]) -> str:
    """The label, or with a number if a folder of its name is taken; it is taken from now on."""
    number, found = 1, label
    while slug(found) in taken:
        number += 1
        found = f"{label} {number}"
    taken.add(slug(found))
    return found
