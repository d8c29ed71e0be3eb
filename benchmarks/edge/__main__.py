"""Seconds and joules on fleets: the runs that are missing, the most important first, and the page.

    python -m benchmarks.edge digits
    python -m benchmarks.edge fmnist kws --device cuda --seconds 500 --out DIR
    python -m benchmarks.edge fmnist kws --device cuda --share 1/3     # every third run, beside the other two thirds
    python -m benchmarks.edge digits --devices FILE.csv --out DIR      # on your own devices, in a folder of your own
    python -m benchmarks.edge --timed        # stored runs of benchmarks/rounds, timed without training
    python -m benchmarks.edge --take DIR     # append another folder's results to the published ones
    python -m benchmarks.edge --page         # the page from what is stored

Finished runs are stored as they end and never repeated; a run that the time limit stops is begun again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import fedge
from benchmarks.edge import measure, page, timed, yours
from benchmarks.edge.measure import Entry, entry_of


def main() -> None:
    options = parser().parse_args()
    if unknown := [one for one in options.problems if one not in measure.PROBLEMS]:
        raise SystemExit(f"unknown problem {unknown[0]!r}: there are {', '.join(measure.PROBLEMS)}")
    if options.devices:
        own(options)
    elif options.timed:
        for line in timed.lines(done(options.out)):
            store((options.out or measure.RESULTS) / "results.jsonl", [line])
    elif options.take:
        take(options.take)
    elif options.problems:
        do(options)
    if options.out is None:
        page.write()


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.edge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("problems", nargs="*", default=[], metavar="PROBLEM", help=", ".join(measure.PROBLEMS))
    found.add_argument("--device", default="cpu")
    found.add_argument("--compile", action="store_true")
    found.add_argument("--rounds", type=int, help="a trial; not comparable with the published lines")
    found.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    found.add_argument("--share", default="0/1", help="K/N: of all runs the K-th of every N, from 0")
    found.add_argument("--out", type=Path, help="a folder for the results, in place of the published ones")
    found.add_argument(
        "--devices", type=Path, metavar="FILE", help="a CSV file (fedge.edge.Table) for the three fleets"
    )
    found.add_argument("--timed", action="store_true", help="time the yardstick's stored runs on every fleet")
    found.add_argument("--take", type=Path, metavar="DIR")
    found.add_argument("--page", action="store_true", help="write the page and do no run")
    return found


def do(options: argparse.Namespace) -> None:
    """Train what is missing until the time is over."""
    end = time.monotonic() + options.seconds
    place, shares = map(int, options.share.split("/"))
    file = f"results-{place}.jsonl" if shares > 1 else "results.jsonl"
    engine = engine_of(options)
    missing = runs(options.problems, done(options.out))
    print(f"{len(missing[place::shares])} runs to do", flush=True)
    for entry in missing[place::shares]:
        if time.monotonic() >= end:
            break
        lines = measure.run(entry, engine, options.rounds, lambda: time.monotonic() >= end)
        store((options.out or measure.RESULTS) / file, new(lines, done(options.out)))
        for line in lines[:1]:
            words = f"{entry.problem} {entry.fleet} {entry.method} seed {entry.seed}"
            print(f"{words}: {line['final']:.3f}, {line['rounds_to']} rounds, {line['wall']:.0f} s", flush=True)
    left = runs(options.problems, done(options.out))
    print(f"{len(missing) - len(left)} runs done, {len(left)} left", flush=True)


def engine_of(options: argparse.Namespace) -> fedge.Engine:
    precision = "tf32" if options.device.startswith("cuda") else "fp32"
    return fedge.Engine(options.device, precision, options.compile)


def own(options: argparse.Namespace) -> None:
    """On the user's devices; they have to be there, and a folder that is not the published one."""
    if options.out is None or options.out.resolve() == measure.RESULTS.resolve() or not options.problems:
        raise SystemExit("--devices needs a PROBLEM and --out DIR: your devices are not among the published results")
    try:
        yours.do(options, engine_of(options), store)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--devices {options.devices}: {error}") from error


def runs(problems: list[str], known: list[Entry]) -> list[Entry]:
    """What has to be trained, in order; a method that waits for all is trained once for all fleets."""
    found, covered = list[Entry](), set[tuple[str, str, int]]()
    for entry in measure.ordered(problems):
        name = (entry.problem, entry.method, entry.seed)
        if entry in known or name in covered:
            continue
        found.append(entry)
        if entry.method in measure.WAITS:
            covered.add(name)
    return found


def done(out: Path | None) -> list[Entry]:
    """What is stored, here and among the published results."""
    lines = measure.lines() + ([] if out is None else [one for file in files(out) for one in measure.lines(file)])
    return [entry_of(line) for line in lines]


def new(lines: list[dict[str, Any]], known: list[Entry]) -> list[dict[str, Any]]:
    return [line for line in lines if entry_of(line) not in known]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("results*.jsonl"))


def store(file: Path, lines: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        opened.writelines(json.dumps(line) + "\n" for line in lines)


def take(folder: Path) -> None:
    """Lines of another folder that are not stored yet; none of a user's own devices."""
    found = [line for file in files(folder) for line in measure.lines(file) if line["fleet"] in measure.FLEETS]
    lines = new(found, done(None))
    store(measure.RESULTS / "results.jsonl", lines)
    print(f"{len(lines)} new lines")


if __name__ == "__main__":
    main()
