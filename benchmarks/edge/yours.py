"""The methods on the user's own devices: a CSV file in place of the three fleets, results in a folder of their own.

Nothing that is published counts as done, and nothing of this goes among what is published.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fedge
from benchmarks.edge import measure, page
from benchmarks.edge.measure import Entry
from fedge.edge import Table

FLEET = "yours"
Line = dict[str, Any]
Store = Callable[[Path, list[Line]], None]


def do(options: argparse.Namespace, engine: fedge.Engine, store: Store) -> None:
    """Train what is missing in the folder until the time is over; the table is printed and stored there."""
    end = time.monotonic() + options.seconds
    fleets = {FLEET: Table(str(options.devices), measure.CLIENTS)}
    file, about = options.out / "results.jsonl", {"devices": digest(options.devices)}
    known = _known(file, about, options.rounds)
    missing = [entry for entry in entries(options.problems) if entry not in known]
    print(f"{len(missing)} runs to do, {len(known)} are in {file}", flush=True)
    for at, entry in enumerate(missing, 1):
        if time.monotonic() >= end:
            break
        lines = measure.run(entry, engine, options.rounds, lambda: time.monotonic() >= end, fleets)
        store(file, [line | about for line in lines])
        for line in lines:
            words = f"{entry.problem} {entry.method} seed {entry.seed}: {line['wall']:.0f} s"
            print(f"{at} of {len(missing)}: {words}", flush=True)
    left = set(entries(options.problems)) - set(_known(file, about, options.rounds))
    table = page.on_fleets([FLEET], measure.lines(file))
    (options.out / "table.md").write_text(table)
    print(f"\n{table}\n{len(left)} runs left; {file}, {options.out / 'table.md'}", flush=True)


def entries(problems: list[str]) -> list[Entry]:
    """All methods of the tables with three fleets, seed by seed."""
    seeds = [(problem, seed) for problem in problems for seed in measure.PROBLEMS[problem].seeds]
    return [Entry(problem, FLEET, method, seed) for problem, seed in seeds for method in measure.EVERYWHERE]


def digest(file: Path) -> str:
    """What identifies a file of devices."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _known(file: Path, about: Line, rounds: int | None) -> list[Entry]:
    """What the folder has; runs on other devices, or of other lengths, are not continued."""
    found = list[Entry]()
    for line in measure.lines(file):
        wanted = about | {"rounds": rounds or measure.PROBLEMS[line["problem"]].rounds}
        if wanted != {name: line.get(name) for name in wanted}:
            raise SystemExit(f"{file} has runs on other devices or of another number of rounds: give another --out")
        found.append(measure.entry_of(line))
    return found
