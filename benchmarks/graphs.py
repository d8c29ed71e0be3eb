"""Models that are not chains, against a plain loop over clients: the table in docs/speed.md.

OMP_NUM_THREADS=1 python -m benchmarks.graphs [WORKLOAD]...    measures on one CPU thread and keeps the figures
python -m benchmarks.graphs --page                             writes the table from the figures
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fedge.bench import WORKLOADS, measure
from fedge.runs.folder import versions

REPEATS = 5
NAMES = ("R", "R2", "L", "L2", "U", "U2", "T", "T2", "TA", "TA2")
FIGURES, PAGE = Path(__file__).parent / "graphs.json", Path(__file__).parents[1] / "docs" / "speed.md"
BEGIN, END = "<!-- graphs: python -m benchmarks.graphs --page -->\n", "<!-- /graphs -->"
HEAD = """| workload | what | way | ms per round | loop, ms | times faster (every turn) | command |
|---|---|---|---|---|---|---|
"""


def row(one: dict[str, Any]) -> str:
    ours, loop = (1e3 * statistics.median(one[name]) for name in ("seconds", "plain"))
    turns = sorted(b / a for a, b in zip(one["seconds"], one["plain"], strict=True))
    name, command = one["workload"], f"`OMP_NUM_THREADS=1 fedge bench {one['workload']} --device cpu`"
    faster = f"{loop / ours:.1f} ({turns[0]:.1f} to {turns[-1]:.1f})"
    return f"| {name} | {WORKLOADS[name].title} | {one['way']} | {ours:.0f} | {loop:.0f} | {faster} | {command} |\n"


def table() -> str:
    kept = json.loads(FIGURES.read_text())
    return HEAD + "".join(row(kept["timings"][name]) for name in NAMES if name in kept["timings"])


def write() -> None:
    text = PAGE.read_text("utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.split(END)[1]}", "utf-8")


def main(args: list[str]) -> None:
    if args == ["--page"]:
        write()
        return
    kept = json.loads(FIGURES.read_text()) if FIGURES.exists() else {"timings": {}}
    kept |= {"versions": versions(), "threads": torch.get_num_threads()}
    for name in args or NAMES:
        kept["timings"][name] = asdict(measure(WORKLOADS[name], "cpu", repeats=REPEATS))
        FIGURES.write_text(json.dumps(kept, indent=1))
        print(row(kept["timings"][name]), end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
