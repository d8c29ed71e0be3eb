"""`--set key=value`: dotted keys into the tables of an experiment, before they are checked."""

from __future__ import annotations

import copy
import dataclasses
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedge import toml
from fedge.checks import nearest
from fedge.experiment.errors import ExperimentError
from fedge.experiment.fields import Table, unknown
from fedge.experiment.labels import distinct_labels
from fedge.experiment.own import marked
from fedge.experiment.parsing import Experiment, algorithm_tables
from fedge.experiment.parts import ALGORITHM, PARTS, Part
from fedge.runs.experiments import slug

CHOOSERS = ("kind", "name")


def override(tables: Mapping[str, Any], settings: Iterable[str], folder: Path | None = None) -> Table:
    """The tables with these settings in place.

    `algorithm.lr` is for all algorithms that have the field, inside a wrapper if the wrapper itself has not;
    `algorithm.2.lr` and `algorithm.fedova.inner.lr` are for one. A new `kind` or `name` drops the fields that only
    the old one had. Own parts are named from `folder`.
    """
    found = copy.deepcopy(dict(tables))
    split = [(path, marked({"value": value}, folder)["value"]) for path, value in map(_split, settings)]
    # What is chosen comes first: only then is it known which fields there are.
    for path, value in sorted(split, key=lambda one: len(one[0]) if one[0][-1] in CHOOSERS else math.inf):
        if path[0] == "algorithm" and len(path) > 1:
            _set_algorithm(found, path[1:], value)
        else:
            _check_table(found, path)
            _set(found, path, value, PARTS.get(path[0]))
            _one_of_two(found, path, [one for one, _ in split])
    return found


def _one_of_two(tables: Table, path: list[str], given: list[list[str]]) -> None:
    """`train.seeds` takes the place of the file's `train.seed`, and the other way round."""
    other = {"seed": "seeds", "seeds": "seed"}.get(path[-1])
    if path[:-1] == ["train"] and other is not None and ["train", other] not in given:
        tables["train"].pop(other, None)


def _check_table(tables: Table, path: list[str]) -> None:
    """`rounds` alone is no key; the table that has such a field is named."""
    known = [field.name for field in dataclasses.fields(Experiment)]
    if path[0] in known or nearest(path[0], known):
        return  # fine, or a typo that the check of the whole experiment names
    if owners := [table for table in known if path[-1] in _fields(tables, table)]:
        full = " or ".join(f"{table}.{path[-1]}" for table in owners)
        raise ExperimentError(f"--set {'.'.join(path)}: unknown key {path[0]!r} (did you mean {full}?)")


def _fields(tables: Table, name: str) -> list[str]:
    """The fields that a table of this experiment can have."""
    table = tables.get(name, {})
    if name == "algorithm":
        return [key for one in algorithm_tables(tables) for inner in _nested(one) for key in _known(inner)]
    part = PARTS.get(name)
    if name == "edge" and name not in tables:
        return []  # most experiments have no devices
    if part is None or (part.key is not None and not part.knows(table)):
        return []
    return [one.name for one in part.fields(table, name).values() if one.plain and one.name not in part.derived]


def _split(setting: str) -> tuple[list[str], Any]:
    key, equals, text = setting.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path) or len(path) > toml.DEEPEST:
        raise ExperimentError(f"--set {setting[:100]}: expected key=value, such as train.rounds=20")
    return path, _value(text.strip())


def _value(text: str) -> Any:
    """What TOML reads, or else the text itself, so that strings need no quotes."""
    try:
        found = toml.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if "nested" in str(error):
            raise ExperimentError(f"--set ...={text[:20]}...: {error}") from None
        return text
    return found["value"] if len(found) == 1 else text


def _set(table: Table, path: list[str], value: Any, part: Part | None) -> None:
    *way, key = path
    for step in way:
        table = table.setdefault(step, {})
        if not isinstance(table, dict):
            raise ExperimentError(f"--set {'.'.join(path)}: {step} is {table!r}, expected a table")
    if part is not None and key == part.key and value != table.get(key):
        _drop_fields_of_old(table, part, value, path)
    table[key] = value


def _drop_fields_of_old(table: Table, part: Part, choice: Any, path: list[str]) -> None:
    new = {part.key or "": choice}
    if not isinstance(choice, str) or not part.knows(new):
        return  # the check of the whole experiment says so
    kept = part.fields(new, f"--set {'.'.join(path)}")
    for key in set(table) - set(kept):
        del table[key]


def _set_algorithm(tables: Table, path: list[str], value: Any) -> None:
    algorithms = algorithm_tables(tables)
    if len(path) > 1 and (chosen := _addressed(algorithms, path[0])):
        for table in chosen:
            _set(table, path[1:], value, ALGORITHM)
        return
    owners = [owner for table in algorithms if (owner := _owner(table, path)) is not None]
    if not owners:
        labels = distinct_labels(algorithms) if len(path) > 1 else []
        known = labels + [name for table in algorithms for name in _known(table)]
        raise unknown(path[0], dict.fromkeys(known), "--set algorithm: ")
    for owner in owners:
        _set(owner, path, value, ALGORITHM)


def _addressed(algorithms: list[Table], word: str) -> list[Table]:
    """Those at a position (from 1), with a label, or with a name; none if the word is a field."""
    if word.isascii() and word.isdecimal() and len(word) < 10:
        if not 1 <= int(word) <= len(algorithms):
            count = len(algorithms)
            raise ExperimentError(f"--set algorithm.{word}: there are {count} algorithms, counted from 1")
        return [algorithms[int(word) - 1]]
    labels = distinct_labels(algorithms)
    labelled = [one for one, label in zip(algorithms, labels, strict=True) if slug(label) == slug(word)]
    return labelled or [one for one in algorithms if one.get("name") == word]


def _owner(table: Any, path: list[str]) -> Table | None:
    """The table itself, or the one inside it, that has the field."""
    return next((one for one in _nested(table) if path[0] in _known(one)), None)


def _nested(table: Any) -> Iterator[Table]:
    """An algorithm, the one inside it, the one inside that."""
    while isinstance(table, dict):
        yield table
        table = table.get("inner")


def _known(table: Table) -> list[str]:
    return ["name", "label", *(ALGORITHM.fields(table, "algorithm") if ALGORITHM.knows(table) else ())]
