"""The swept fields of a table: `lr = {sweep = [0.05, 0.1]}`, and `seeds = [0, 1, 2]` in [train]."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from fedge.experiment.errors import ExperimentError
from fedge.experiment.fields import Table
from fedge.experiment.values import NONE

SWEEP, SEEDS = "sweep", "seeds"
NOT_SWEPT = {"inner": "an algorithm: write one [[algorithm]] per inner", "label": "a name: leave it out"}
Choice = dict[tuple[str, ...], Any]  # path of a field -> its value


@dataclass(frozen=True)
class Axis:
    """A field and the values that it takes, one after another."""

    path: tuple[str, ...]
    values: tuple[Any, ...]
    follows: bool = False  # takes the seed of the run, whatever that is


def is_sweep(value: Any) -> bool:
    return isinstance(value, Mapping) and SWEEP in value


def sweeps(tables: Any) -> bool:
    """Whether anything in these tables is swept."""
    if isinstance(tables, Mapping):
        seeds = isinstance(tables.get("train"), Mapping) and SEEDS in tables["train"]
        return seeds or is_sweep(tables) or any(map(sweeps, tables.values()))
    return isinstance(tables, list) and any(map(sweeps, tables))


def axes(table: Mapping[str, Any], where: str, path: tuple[str, ...] = ()) -> Iterator[Axis]:
    """The swept fields of a table and of the tables in it; `where` is for errors."""
    for key, value in table.items():
        if is_sweep(value):
            yield _axis(value, where, (*path, key))
        elif isinstance(value, Mapping):
            yield from axes(value, where, (*path, key))


def _axis(value: Mapping[str, Any], where: str, path: tuple[str, ...]) -> Axis:
    name = ".".join(path)
    if len(value) > 1:
        others = ", ".join(key for key in value if key != SWEEP)
        raise ExperimentError(f"{where}: {name} is a table: sweep a field in it; beside sweep there is {others}")
    if path[-1] in NOT_SWEPT:
        raise ExperimentError(f"{where}: {name} cannot be swept, it is {NOT_SWEPT[path[-1]]}")
    if value[SWEEP] == SEEDS:
        return Axis(path, (), follows=True)
    return Axis(path, listed(value[SWEEP], f"{where}: {name}", "{sweep = [0.05, 0.1]}"))


def listed(values: Any, what: str, example: str) -> tuple[Any, ...]:
    """A list with at least one value and none of them twice."""
    if not isinstance(values, list):
        raise ExperimentError(f"{what} sweeps {values!r}, expected a list, such as {example}")
    if not values:
        raise ExperimentError(f"{what} sweeps an empty list: there would be no run; give it a value or leave it out")
    for at, value in enumerate(values):
        if any(type(value) is type(one) and value == one for one in values[:at]):
            raise ExperimentError(f"{what} has {value!r} twice in its list: leave one out")
    return tuple(values)


def choices(found: Sequence[Axis]) -> Iterator[Choice]:
    """Every combination; the last axis changes fastest."""
    own = [axis for axis in found if not axis.follows]
    for values in product(*(axis.values for axis in own)):
        yield {axis.path: value for axis, value in zip(own, values, strict=True)}


def with_choice(table: Mapping[str, Any], choice: Choice) -> Table:
    """The table with these values in place."""
    new: Table = copy.deepcopy(dict(table))
    for path, value in choice.items():
        at = new
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value
    return new


def words(choice: Choice) -> str:
    """`lr=0.05 alpha=1`: fields by their last name, unless two of them end the same."""
    ends = [path[-1] for path in choice]
    named = {path: path[-1] if ends.count(path[-1]) == 1 else ".".join(path) for path in choice}
    return " ".join(f"{named[path]}={_text(value)}" for path, value in choice.items())


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        rest = ", ".join(f"{key}={_text(one)}" for key, one in value.items() if key != "name")
        return f"{value.get('name', '')}({rest})" if rest else str(value.get("name", value))
    return NONE if value is None else str(value)
