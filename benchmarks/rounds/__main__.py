"""`python -m benchmarks.rounds ROW`: tune a method on held-out data and train what is chosen with three seeds.

    python -m benchmarks.rounds fmnist-iid/FedAvg-SGD --device cuda --seconds 560 --out DIR
    python -m benchmarks.rounds all --plan
    python -m benchmarks.rounds --take DIR      # append another folder's results to the published ones
    python -m benchmarks.rounds --tables        # the tables of the stored results
    python -m benchmarks.rounds --page          # docs/second-order.md, its figure and the README's parts

ROW is `all`, a problem, or problem/method of grid.toml. Finished runs are stored as they end and never repeated.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from . import grid, measure, page, store
from .findings import Findings
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
    bench = Bench(known, lines, options.device, measure.now() + options.seconds)
    rows = known.rows(options.row)
    if options.plan:
        show(bench, rows)
        return
    try:
        for row in rows:
            (bench.attempt if options.attempt else bench.do)(row)
    except measure.OutOfTime:
        print("the time is over: what is finished is stored, the next call goes on")
        return
    print("all done")


def show(bench: Bench, rows: list[grid.Row]) -> None:
    total = 0.0
    for name, runs, seconds in plan(bench, rows):
        total += seconds
        print(f"{name:42} {runs:3} runs {seconds:6.0f} s, up to here {total:6.0f} s")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.rounds", description=__doc__)
    found.formatter_class = argparse.RawDescriptionHelpFormatter
    found.add_argument("row", nargs="?", default="all", metavar="ROW", help="all, a problem, or problem/method")
    found.add_argument("--device", default="cpu")
    found.add_argument("--seconds", type=float, default=math.inf, help="stop cleanly before so many have passed")
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
