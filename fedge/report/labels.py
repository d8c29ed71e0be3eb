"""Labels that tell runs apart: the algorithm, and what differs where algorithms are equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedge.report.read import RunFolder

MOST_KEYS = 5  # more differing keys than these make a label longer than the run's name


def distinct(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """The same runs; equal labels get the differing config keys, or else the run's name."""
    return [replace(run, label=label) for run, label in zip(runs, told_apart(runs), strict=True)]


def told_apart(runs: Sequence[RunFolder]) -> list[str]:
    """A label for each of these runs, no two alike."""
    groups: dict[str, list[RunFolder]] = defaultdict(list)
    for run in runs:
        groups[run.label].append(run)
    labels = {
        run.path: f"{label} ({detail})" if detail else label
        for label, group in groups.items()
        for run, detail in zip(group, _details(group), strict=True)
    }
    if len(set(labels.values())) < len(runs):
        labels = {run.path: f"{run.label} ({run.path})" for run in runs}
    return [labels[run.path] for run in runs]


def _details(group: Sequence[RunFolder]) -> list[str]:
    """The first way of naming the runs of one label that gives each its own words."""
    if len(group) == 1:
        return [""]
    names = [run.name for run in group]
    for words in (_differences(group), names):
        if all(words) and len(set(words)) == len(group):
            return words
    return [str(run.path) for run in group]


def _differences(group: Sequence[RunFolder]) -> list[str]:
    """`lr=0.1` for every run, from the keys whose values are not all equal."""
    flat = [flatten(run.config) for run in group]
    keys = differing(flat)
    if len(keys) > MOST_KEYS:
        return [""] * len(group)
    heads = _heads(keys)
    short = shorten(heads)
    return [", ".join(f"{short[head]}={_value(config, head, keys)}" for head in heads) for config in flat]


def _heads(keys: Sequence[str]) -> list[str]:
    """The keys, with those of a table that has a name, such as a policy, as one."""
    tables = {key.removesuffix(".name") for key in keys if key.endswith(".name")}
    return list(dict.fromkeys(next((one for one in tables if key.startswith(f"{one}.")), key) for key in keys))


def _value(config: dict[str, Any], head: str, keys: Sequence[str]) -> str:
    """A value, or `deadline(seconds=0.5)` of a table with a name: its fields among the keys."""
    if head in config or f"{head}.name" not in config:
        return str(config.get(head, "default"))
    fields = [key for key in keys if key.startswith(f"{head}.") and key in config and key != f"{head}.name"]
    told = ", ".join(f"{key.removeprefix(f'{head}.')}={config[key]}" for key in fields)
    return f"{config[f'{head}.name']}({told})" if told else str(config[f"{head}.name"])


def varying(flat: Sequence[dict[str, Any]]) -> list[str]:
    """Keys whose values are not all equal."""
    keys = sorted({key for config in flat for key in config})
    return [key for key in keys if len({repr(config.get(key)) for config in flat}) > 1]


def differing(flat: Sequence[dict[str, Any]]) -> list[str]:
    """The same without keys that follow from another one: a model's seed from train's."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for key in sorted(varying(flat), key=lambda key: (not key.startswith("train."), key)):
        values = [repr(config.get(key)) for config in flat]
        pattern = tuple(values.index(value) for value in values)
        if pattern not in seen:
            seen.add(pattern)
            found.append(key)
    return sorted(found)


def shorten(keys: Sequence[str]) -> dict[str, str]:
    """`algorithm.lr` -> `lr`, where no other key ends the same."""
    last = [key.rsplit(".", 1)[-1] for key in keys]
    return {key: end if last.count(end) == 1 else key for key, end in zip(keys, last, strict=True)}


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
