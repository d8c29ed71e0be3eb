"""A sweep whose results are compared with something: what `fedge reproduce` needs to know of a paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedge.sweep.entries import Entry
from fedge.sweep.files import Files
from fedge.sweep.halving import Backbones
from fedge.sweep.store import Store


@dataclass(frozen=True)
class Study:
    """Its files, the settings that were chosen for it, and how the results of an experiment are shown."""

    files: Files
    chosen: Path  # a store of tuning that comes with it, used where the user has tuned nothing
    page: Callable[[Sequence[Entry], Store], str]  # title, table and claims, as Markdown
    details: Callable[[Sequence[Entry], Store], str]  # what the numbers were measured with
    draw: Callable[[Sequence[Entry], Store, Path], Path | None]  # None without matplotlib, or without results
    backbones: Backbones = field(default_factory=dict)  # method -> the one whose settings it takes if untuned
