"""Figures by processor: a file has one entry for each that was measured, and a command writes its own machine's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedge.runs.folder import versions
from fedge.sweep.hardware import hardware

Figures = dict[str, dict[str, Any]]


def stored(file: Path) -> Figures:
    """What each processor's measurement left; nothing if there is no file."""
    found: Figures = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return found


def own(figures: Figures, empty: Any) -> dict[str, Any]:
    """The entry of this processor, with `empty` for timings if there is none yet."""
    entry = figures.setdefault(hardware("cpu"), {"timings": empty})
    entry["versions"] = versions()
    return entry


def keep(file: Path, figures: Figures) -> None:
    file.write_text(json.dumps(figures, indent=1), "utf-8")


def in_short(processor: str) -> str:
    """Its name without what all names have.

    >>> in_short("Intel(R) Xeon(R) Processor, 2 threads")
    'Intel Xeon'
    """
    name = processor.partition(",")[0].replace("(R)", "").replace("(TM)", "")
    return " ".join(word for word in name.split() if word not in {"Processor", "CPU"})
