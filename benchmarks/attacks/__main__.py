"""`python -m benchmarks.attacks`: docs/attacks.md from the results; `digits` or `fmnist`: the runs that are missing."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.attacks import page
from fedge.attacks import KINDS
from fedge.attacks.study import DEFENCES, cases, study
from fedge.experiment import build, load

FILES: dict[str, Path | None] = {"digits": None, "fmnist": Path(__file__).parent / "fmnist.toml"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__)
    parser.add_argument("problems", nargs="*", default=[], metavar="PROBLEM", help=", ".join(FILES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="such as train.rounds=10")
    options = parser.parse_args()
    for problem in options.problems:
        experiment = load(FILES[problem], [f"train.device={options.device}", *options.set])
        wanted = cases(experiment, list(KINDS), page.SHARES, list(DEFENCES))
        file = page.RESULTS / problem / "attacks.jsonl"
        study(wanted, build(experiment), file, lambda line: print(line, flush=True))
    if not options.problems:
        page.write()


if __name__ == "__main__":
    main()
