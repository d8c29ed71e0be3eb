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
    parser.add_argument("--share", action="append", type=float, help="of the clients that lie; repeatable")
    parser.add_argument("--defence", action="append", choices=list(DEFENCES), help="repeatable")
    options = parser.parse_args()
    shares, defences = options.share or page.SHARES, options.defence or list(DEFENCES)
    for problem in options.problems:
        experiment = load(FILES[problem], [f"train.device={options.device}", *options.set])
        wanted = cases(experiment, list(KINDS), shares, defences)
        file = page.RESULTS / problem / "attacks.jsonl"
        study(wanted, build(experiment), file, lambda line: print(line, flush=True))
    if not options.problems:
        page.write()


if __name__ == "__main__":
    main()
