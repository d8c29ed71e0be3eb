"""`python -m benchmarks.new_class`: run, then write docs/new-class.md and its picture (`--page`: only that)."""

from __future__ import annotations

import json
import sys

import torch

import fedge

from . import page
from .measure import METHODS, SEEDS, follow


def measure() -> None:
    data, found = fedge.data.load("digits"), []
    for name in METHODS:
        for seed in SEEDS:
            found.append(follow(name, seed, data))
            print(f"{name}, seed {seed}: new class {100 * found[-1]['new'][-1]:.1f} %", flush=True)
    page.RESULTS.write_text("".join(json.dumps(line) + "\n" for line in found), "utf-8")


def main(arguments: list[str]) -> None:
    if arguments not in ([], ["--page"]):
        sys.exit(f"unknown arguments {' '.join(arguments)}: give none, or --page to write the page alone")
    torch.set_num_threads(1)
    if not arguments:
        measure()
    page.write()


if __name__ == "__main__":
    main(sys.argv[1:])
