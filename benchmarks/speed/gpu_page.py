"""The table of what `benchmarks.speed.gpu` measured, in docs/speed.md: `python -m benchmarks.speed.gpu_page`."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.readme import replaced
from fedge.bench import WORKLOADS

from .gpu import PLAN, Line
from .page import markdown

FOLDER = Path(__file__).parent / "h200"
PAGE = Path(__file__).parents[2] / "docs" / "speed.md"
COMMAND = "python -m benchmarks.speed.gpu_page"


def timing(line: Line) -> dict[str, Any] | None:
    path = FOLDER / f"{line.name}.json"
    found: dict[str, Any] | None = json.loads(path.read_text())["timings"][0] if path.is_file() else None
    return found


def around(split: list[Any]) -> float:
    """The share of a round's time in the GPU's stream that is not the clients' work."""
    whole = sum(gpu for _, _, gpu, _ in split)
    return float(sum(gpu for _, _, gpu, clients in split if not clients) / whole)


def row(line: Line, one: dict[str, Any] | None) -> list[str]:
    how = f"{line.precision}{', compiled' if line.compile else ''}"
    head = [line.workload, WORKLOADS[line.workload].title, how]
    command = f"`python -m benchmarks.speed.gpu {line.name} --out DIR`"
    if one is None:
        return [*head, "failed", "", "", "", command]
    loop = f"{1e3 * median(one['plain']):.0f}" if one["plain"] else ""
    ratio = f"{one['ratio']:.1f}" if one["ratio"] else ""
    return [*head, f"{1e3 * one['median']:.1f}", loop, ratio, f"{around(one['split']):.0%}", command]


def table() -> str:
    header = ["workload", "what", "precision", "ms per round", "loop, ms", "times faster", "around the work", "command"]
    return markdown(header, [row(line, timing(line)) for line in PLAN])


def write() -> None:
    PAGE.write_text(replaced(PAGE.read_text("utf-8"), "gpu", table(), COMMAND, PAGE.name), "utf-8")


if __name__ == "__main__":
    write()
