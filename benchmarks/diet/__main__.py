"""`python -m benchmarks.diet digits fmnist kws`: the runs that are missing; `--page`: docs/diet.md from all runs."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import fedge
from fedge.engine import Engine
from fedge.experiment.device import find

from . import measure, page, tune
from .methods import PROBLEMS


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diet", description=__doc__)
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", help=", ".join(PROBLEMS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many; what is done is kept")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2")
    parser.add_argument("--rounds", type=int, help="fewer or more than planned")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, default=measure.RESULTS)
    parser.add_argument("--page", action="store_true", help="write the page and do no run")
    return parser.parse_args()


def work(given: argparse.Namespace) -> None:
    end = time.monotonic() + given.seconds

    def late() -> bool:
        return time.monotonic() > end

    device = find(given.device)
    engine = Engine(device=device, precision=given.precision, compile=given.compile)
    for name in given.problems:
        if name not in PROBLEMS:
            raise SystemExit(f"unknown problem {name}: choose among {', '.join(PROBLEMS)}")
        problem, data = PROBLEMS[name], fedge.data.load(PROBLEMS[name].data)
        rounds, seeds = given.rounds or problem.rounds, tuple(given.seeds or problem.seeds)
        for method, seed in measure.missing(name, seeds, rounds, given.out):
            lr = tune.tune(name, method, data, engine, late, given.out)
            line = None if lr is None else measure.run(name, method, seed, rounds, data, engine, late, lr)
            if line is None:
                print("time is up: the same command goes on from here")
                return
            measure.add(line, given.out)
            last = line["accuracy"][-5:]
            told = f"{100 * sum(last) / len(last):.1f} %" if last else "nothing"
            print(f"{name} {method.name} seed {seed}: {told}, {line['seconds']} s", flush=True)


def main() -> None:
    given = options()
    if str(given.device) == "cpu":
        torch.set_num_threads(1)
    if not given.page:
        work(given)
    else:
        page.write()


if __name__ == "__main__":
    main()
