"""`python -m benchmarks.curvature [IID | "two labels"]`: tune, run, write results/*.jsonl and docs/curvature.md.

`--page` writes the page alone. What is stored is not done again: remove a file of results/ to measure it anew.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

import fedge
from benchmarks.algorithms.measure import validation_split
from benchmarks.algorithms.methods import Method
from benchmarks.theory.store import versions

from . import page
from .measure import CONFIG, HELD_OUT, SEEDS, work
from .methods import METHODS


def measure(problem: str, methods: tuple[Method, ...] = METHODS, folder: Path = page.RESULTS) -> None:
    data = fedge.data.load("digits")
    held_out = validation_split(data)
    path = folder / f"{problem.replace(' ', '-')}.jsonl"
    lines = page.load(path)
    if not lines:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"kind": "config", **CONFIG, "problem": problem, "versions": versions()}) + "\n")
    for method in methods:
        if sum(line["kind"] == "run" and line["method"] == method.name for line in lines[1:]) == len(SEEDS):
            continue
        begin = time.perf_counter()
        found = [*work(method, problem, data, held_out)]
        with path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in found))
        print(f"{problem}, {method.name}: {found[-1]['setting']}, {time.perf_counter() - begin:.0f} s", flush=True)


def main(arguments: list[str]) -> None:
    problems = [] if arguments == ["--page"] else arguments or list(HELD_OUT)
    unknown = [name for name in problems if name not in HELD_OUT]
    if unknown:
        sys.exit(f"unknown problem {unknown[0]!r}: choose from {', '.join(HELD_OUT)}, or give --page alone")
    torch.set_num_threads(1)
    for problem in problems:
        measure(problem)
    page.write()


if __name__ == "__main__":
    main(sys.argv[1:])
