"""Runs that differ in nothing but their seeds, together: one line of a picture, one row of a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fedge.report.labels import flatten, shorten, told_apart
from fedge.report.read import RunFolder
from fedge.report.series import Against, curve

SEEDS = ("train.seed", "partition.seed", "model.seed")
NOT_THE_RESULT = ("name", "algorithm.label", "train.device", "train.checkpoint_every", "data.path")


class Spread(NamedTuple):
    """The mean of some values, and their sample standard deviation (None: of one value there is none)."""

    mean: float
    deviation: float | None
    runs: int  # that have a value


@dataclass(frozen=True)
class Group:
    """Runs of one configuration with different seeds."""

    label: str
    runs: tuple[RunFolder, ...]
    fields: Mapping[str, str]  # what tells it from the other groups: {"lr": "0.1"}

    @property
    def seeds(self) -> int:
        return len(self.runs)


def grouped(runs: Sequence[RunFolder]) -> list[Group]:
    """In the order of their first runs; labels hold only what differs."""
    found: dict[str, list[RunFolder]] = {}
    for run in runs:
        found.setdefault(_key(run), []).append(run)
    together = [part for group in found.values() for part in _by_seed(group)]
    firsts = [_without_seeds(group[0]) for group in together]
    labels, fields = told_apart(firsts), _fields([run.config for run in firsts])
    return [Group(label, tuple(group), named) for label, group, named in zip(labels, together, fields, strict=True)]


def _key(run: RunFolder) -> str:
    """Equal for runs of one configuration; a run that states no seed is alone."""
    flat = flatten(run.config)
    if not any(name in flat for name in SEEDS):
        return str(run.path)
    kept = {name: value for name, value in flat.items() if name not in (*SEEDS, *NOT_THE_RESULT)}
    return repr([run.stated, sorted(kept.items())])


def _by_seed(group: Sequence[RunFolder]) -> list[list[RunFolder]]:
    """All of them together, unless a seed is there twice: then somebody compares equal runs."""
    seeds = [[flatten(run.config).get(name) for name in SEEDS] for run in group]
    return [list(group)] if all(seeds.count(one) == 1 for one in seeds) else [[run] for run in group]


def _without_seeds(run: RunFolder) -> RunFolder:
    config = {
        key: {name: one for name, one in value.items() if f"{key}.{name}" not in SEEDS}
        if isinstance(value, dict)
        else value
        for key, value in run.config.items()
    }
    return replace(run, label=run.stated, config=config)


def _fields(configs: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Field -> value in words, for the fields of which there are several values.

    A wrapped algorithm's step size is called as one that is not wrapped; of fields that change together, the first
    is enough.
    """
    flat = [_unwrapped(flatten(config)) for config in configs]
    keys = sorted({key for one in flat for key in one}, key=lambda key: (key != "algorithm.name", key))
    kept, patterns = list[str](), list[list[int]]()
    for key in keys:
        values = [repr(one[key]) if key in one else None for one in flat]
        pattern = [values.index(value) for value in values]
        if len(set(values) - {None}) > 1 and pattern not in patterns and key not in NOT_THE_RESULT:
            kept.append(key)
            patterns.append(pattern)
    short = shorten(kept) | {"algorithm.name": "algorithm"}
    return [{short[key]: str(one[key]) for key in kept if key in one} for one in flat]


def _unwrapped(flat: Mapping[str, Any]) -> dict[str, Any]:
    outer = {key: value for key, value in flat.items() if ".inner." not in key}
    inner = {key.replace(".inner.", "."): key for key in flat if ".inner." in key}
    return outer | {(key if short in outer else short): flat[key] for short, key in inner.items()}


def spread(values: Iterable[float | None]) -> Spread | None:
    """Of those that are there; None if none is."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    mean = math.fsum(there) / len(there)
    if len(there) == 1:
        return Spread(mean, None, 1)
    return Spread(mean, math.sqrt(math.fsum((v - mean) ** 2 for v in there) / (len(there) - 1)), len(there))


class Band(NamedTuple):
    """The mean of several curves, and how far they are from it."""

    x: list[float]
    y: list[float]
    deviation: list[float]  # 0 where there is one value


def band(runs: Sequence[RunFolder], key: str, against: Against) -> Band:
    """Round by round, over the runs that have a value there; MB and seconds are means as well."""
    curves = [(curve(run, key, "rounds"), curve(run, key, against)) for run in runs]
    at: dict[float, list[tuple[float, float]]] = {}
    for rounds, points in curves:
        if not points.y:  # a run without a clock has no place on its axis
            continue
        for number, x, y in zip(rounds.x, points.x, points.y, strict=True):
            at.setdefault(number, []).append((x, y))
    found = Band([], [], [])
    for _, points_there in sorted(at.items()):
        here = spread(y for _, y in points_there)
        if here is not None:
            found.x.append(math.fsum(x for x, _ in points_there) / len(points_there))
            found.y.append(here.mean)
            found.deviation.append(here.deviation or 0.0)
    return found
