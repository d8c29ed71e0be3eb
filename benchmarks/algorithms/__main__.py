"""`python -m benchmarks.algorithms`: tune, run, write results.jsonl and docs/algorithms.md (`--page`: only that)."""

from __future__ import annotations

import sys
import time

import torch

import fedge
from benchmarks.theory.store import versions

from . import page
from .measure import CONFIG, SEEDS, chosen, judged, tune
from .methods import METHODS


def measure() -> None:
    data = fedge.data.load("digits")
    lines = [{"kind": "config", **CONFIG, "versions": versions()}]
    for method in METHODS:
        begin = time.perf_counter()
        trials = tune(method, data)
        runs = [judged(method, chosen(trials), data, seed) for seed in SEEDS]
        lines += [*trials, *runs]
        print(f"{method.name}: {chosen(trials)}, {[run['final'] for run in runs]}, {time.perf_counter() - begin:.0f} s")
    page.save(lines)


def main(arguments: list[str]) -> None:
    if arguments not in ([], ["--page"]):
        sys.exit(f"unknown arguments {' '.join(arguments)}: give none, or --page to write the page alone")
    torch.set_num_threads(1)
    if not arguments:
        measure()
    page.write()


if __name__ == "__main__":
    main(sys.argv[1:])
