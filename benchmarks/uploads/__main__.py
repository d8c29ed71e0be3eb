"""`python -m benchmarks.uploads digits fmnist`: the runs that are missing; `--page`: docs/uploads.md from all runs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from benchmarks.uploads import measure, page


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.uploads", description=__doc__)
    parser.add_argument("problems", nargs="*", default=[], metavar="PROBLEM", help=", ".join(measure.PROBLEMS))
    parser.add_argument("--kind", choices=["codec", "rule", "lies"], help="only these")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--page", action="store_true", help="write the page and do no run")
    options = parser.parse_args()
    kinds = (options.kind,) if options.kind else ("codec", "rule", "lies")
    done = [{name: line[name] for name in ("problem", "kind", "name", "seed")} for line in measure.lines()]
    for problem in options.problems:
        for entry in measure.entries(problem, kinds):
            if asdict(entry) in done:
                continue
            line = measure.run(entry, options.device)
            with (measure.RESULTS / "results.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(
                f"{entry.problem} {entry.kind} {entry.name} seed {entry.seed}: {100 * (line['final'] or 0):.1f} %",
                flush=True,
            )
    if options.page or not options.problems:
        page.write()


if __name__ == "__main__":
    main()
