"""`python -m benchmarks.edge digits`: the runs that are missing and the page; `--page`: the page from all runs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from benchmarks.edge import measure, page


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.edge", description=__doc__)
    parser.add_argument("problems", nargs="*", default=[], metavar="PROBLEM", help=", ".join(measure.PROBLEMS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--page", action="store_true", help="write the page and do no run")
    options = parser.parse_args()
    done = [{name: line[name] for name in ("problem", "fleet", "method", "seed")} for line in measure.lines()]
    for problem in options.problems:
        for entry in measure.entries(problem):
            if asdict(entry) in done:
                continue
            line = measure.run(entry, options.device)
            with (measure.RESULTS / "results.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{entry.problem} {entry.fleet} {entry.method} seed {entry.seed}: {line['final']:.3f}", flush=True)
    page.write()


if __name__ == "__main__":
    main()
