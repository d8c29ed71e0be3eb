"""`python -m benchmarks.privacy digits`: the runs that are missing; `--page`: docs/privacy.md from all runs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from benchmarks.privacy import measure, page


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.privacy", description=__doc__)
    parser.add_argument("problems", nargs="*", default=[], metavar="PROBLEM", help=", ".join(measure.PROBLEMS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--page", action="store_true", help="write the page and do no run")
    options = parser.parse_args()
    done = [{name: line[name] for name in ("problem", "method", "noise", "seed")} for line in measure.lines()]
    for entry in [entry for problem in options.problems for entry in measure.entries(problem)]:
        if asdict(entry) in done:
            continue
        line = measure.run(entry, options.device)
        with (measure.RESULTS / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        what = f"{entry.problem} {entry.method} noise {entry.noise} seed {entry.seed}"
        print(f"{what}: {100 * line['final']:.1f} %, epsilon {line['epsilon']}", flush=True)
    if options.page or not options.problems:
        page.write()


if __name__ == "__main__":
    main()
