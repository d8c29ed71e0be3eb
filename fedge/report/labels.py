"""Labels that tell runs apart: the algorithm, and what differs where algorithms are equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedge.report.read import RunFolder

MOST_KEYS = 2  # more differing keys than these make a label longer than the run's name


def distinct(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """The same runs; equal labels get the differing config keys, or else the run's name."""
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
    return [replace(run, label=labels[run.path]) for run in runs]


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
    flat = [_flatten(run.config) for run in group]
    keys = sorted({key for config in flat for key in config})
    differing = [key for key in keys if len({repr(config.get(key)) for config in flat}) > 1]
    if len(differing) > MOST_KEYS:
        return [""] * len(group)
    short = _shorten(differing)
    return [", ".join(f"{short[key]}={config.get(key, 'default')}" for key in differing) for config in flat]


def _shorten(keys: Sequence[str]) -> dict[str, str]:
    """`algorithm.lr` -> `lr`, where no other key ends the same."""
    last = [key.rsplit(".", 1)[-1] for key in keys]
    return {key: end if last.count(end) == 1 else key for key, end in zip(keys, last, strict=True)}


def _flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
