"""Models that are not chains, against a plain loop over clients: rows of the table in docs/speed.md.

OMP_NUM_THREADS=1 python -m benchmarks.graphs [WORKLOAD]...    measures on one CPU thread and keeps the figures
python -m benchmarks.speed.table                               writes the table from all stored figures
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
FIGURES = Path(__file__).parent / "graphs.json"


def said(one: dict[str, Any]) -> str:
    ours, loop = (1e3 * statistics.median(one[name]) for name in ("seconds", "plain"))
    turns = sorted(b / a for a, b in zip(one["seconds"], one["plain"], strict=True))
    faster = f"{loop / ours:.2f} times faster ({turns[0]:.2f} to {turns[-1]:.2f})"
    return f"{one['workload']}: {ours:.0f} ms per round in the way '{one['way']}', the loop {loop:.0f}: {faster}"


def main(args: list[str]) -> None:
    kept = json.loads(FIGURES.read_text()) if FIGURES.exists() else {"timings": {}}
    kept |= {"versions": versions(), "threads": torch.get_num_threads()}
    for name in args or NAMES:
        kept["timings"][name] = asdict(measure(WORKLOADS[name], "cpu", repeats=REPEATS))
        FIGURES.write_text(json.dumps(kept, indent=1))
        print(said(kept["timings"][name]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
