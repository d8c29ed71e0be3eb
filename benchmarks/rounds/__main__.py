"""`python -m benchmarks.rounds ROW`: tune a method on held-out data and train what is chosen with three seeds.

    python -m benchmarks.rounds fmnist-iid/FedAvg-SGD --device cuda --seconds 560 --out DIR
    python -m benchmarks.rounds all --plan
    python -m benchmarks.rounds all --device cuda --jobs 4     # rows beside each other; their seconds do not count
    python -m benchmarks.rounds all --device cuda --time       # seconds per round of what is chosen, alone
    python -m benchmarks.rounds --take DIR      # append another folder's results to the published ones
    python -m benchmarks.rounds --tables        # the tables of the stored results
    python -m benchmarks.rounds --page          # docs/second-order.md, its figure and the README's parts

ROW is `all`, a problem, or problem/method of grid.toml. Finished runs are stored as they end and never repeated.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from . import grid, measure, page, store
from .findings import Findings
from .jobs import OUT_OF_TIME, Jobs, parts
from .work import Bench, plan


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.page:
        page.write()
        return
    if options.take:
        print(f"{store.take(options.take, options.results)} new lines")
        return
    known = grid.read(options.grid)
    lines = store.Store(options.out or options.results, options.results)
    if options.tables:
        print(page.text(Findings(known, lines)))
        return
    bench = Bench(known, lines, options.device, measure.now() + options.seconds, options.beside)
    rows = list({row.name: row for name in options.row for row in known.rows(name)}.values())
    if options.plan:
        show(bench, rows)
        return
    late = several(bench, rows, options) if options.jobs > 1 else alone(bench, rows, options)
    print("the time is over: what is finished is stored, the next call goes on" if late else "all done")
    if late and options.beside > 1:
        sys.exit(OUT_OF_TIME)


def alone(bench: Bench, rows: list[grid.Row], options: argparse.Namespace) -> bool:
    """One row after the other; whether the time was over first."""
    try:
        for row in rows:
            if options.attempt or options.time:
                (bench.attempt if options.attempt else bench.time)(row)
            else:
                bench.do(row, options.seed)
    except measure.OutOfTime:
        return True
    return False


def several(bench: Bench, rows: list[grid.Row], options: argparse.Namespace) -> bool:
    """Rows with work left, so many at once."""
    left = {name for name, runs, _ in plan(bench, rows) if runs}
    shared = ["--device", options.device, "--grid", options.grid, "--results", options.results]
    shared += ["--out", options.out or options.results, "--beside", options.jobs]
    jobs = Jobs(
        options.jobs,
        [str(Path(one).resolve()) if isinstance(one, Path) else str(one) for one in shared],
        bench.deadline,
    )
    jobs.do(parts([row for row in rows if row.name in left], bench.grid.final["seeds"]))
    if jobs.failed:
        print(f"failed, the rest went on: {', '.join(jobs.failed)}")
    return jobs.late


def show(bench: Bench, rows: list[grid.Row]) -> None:
    total = 0.0
    for name, runs, seconds in plan(bench, rows):
        total += seconds
        print(f"{name:42} {runs:3} runs {seconds:6.0f} s, up to here {total:6.0f} s")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.rounds", description=__doc__)
    found.formatter_class = argparse.RawDescriptionHelpFormatter
    found.add_argument("row", nargs="*", default=["all"], metavar="ROW", help="all, a problem, or problem/method")
    found.add_argument("--device", default="cpu")
    found.add_argument("--seconds", type=float, default=math.inf, help="stop cleanly before so many have passed")
    found.add_argument("--jobs", type=int, default=1, help="rows at once, each in a process of its own")
    found.add_argument("--beside", type=int, default=1, help="how many processes share the device (set by --jobs)")
    found.add_argument("--seed", type=int, help="train with this seed alone")
    found.add_argument("--time", action="store_true", help="seconds per round of the chosen settings; run it alone")
    found.add_argument("--out", type=Path, help="the folder for new results (default: the published ones)")
    found.add_argument("--results", type=Path, default=store.RESULTS, help="the published results")
    found.add_argument("--grid", type=Path, default=grid.GRID)
    found.add_argument("--plan", action="store_true", help="what is left to do, and about how long it takes")
    found.add_argument("--try", dest="attempt", action="store_true", help="a few rounds of each row, not stored")
    found.add_argument("--take", type=Path, metavar="DIR", help="append the new lines of a folder to the results")
    found.add_argument("--tables", action="store_true", help="print the tables of the stored results")
    found.add_argument("--page", action="store_true", help="write docs/second-order.md from the published results")
    return found


if __name__ == "__main__":
    main()
