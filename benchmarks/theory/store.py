"""Results as small JSON files and pictures, side by side."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import scipy
import torch
from matplotlib.figure import Figure

import fedge

RESULTS = Path(__file__).parent / "results"


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    modules = {"fedge": fedge, "torch": torch, "numpy": numpy, "scipy": scipy}
    found = {name: str(module.__version__).split("+")[0] for name, module in modules.items()}
    return {"python": platform.python_version(), **found, "processor": platform.machine(), "threads": "1"}


def save(name: str, result: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(result | {"versions": versions()}, indent=1)
    (RESULTS / f"{name}.json").write_text(_short_lists(text) + "\n")


def load(name: str) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return stored


def save_picture(name: str, figure: Figure) -> None:
    figure.savefig(RESULTS / f"{name}.png", dpi=110, metadata={"Software": None})


def digits(values: Sequence[float], figures: int = 3) -> list[float]:
    """So many significant digits: curves for pictures need no more."""
    return [float(f"{value:.{figures}g}") for value in values]


def _short_lists(text: str) -> str:
    """Numbers of one list on one line: `json.dumps` would give each its own."""
    lines: list[str] = []
    for line in text.split("\n"):
        bare = line.strip()
        if lines and bare[:1] in "-0123456789]N" and lines[-1].rstrip()[-1] in "[,0123456789N":
            lines[-1] += ("" if lines[-1].endswith("[") or bare.startswith("]") else " ") + bare
        else:
            lines.append(line)
    return "\n".join(lines)
