"""Every row's own step size, where a problem has a grid: tried on a held-out fifth of the training set with two seeds.

Chosen is what reaches the target on held-out data in the fewest rounds on average (never counts as one round more than
there are), of equals what ends highest. The test set has no say.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean

from fedge.data import Data
from fedge.data.split import hold_out
from fedge.engine import Engine

from .measure import RESULTS, Line, add, lines, run
from .methods import PROBLEMS, Method

TRIALS = "trials"  # the folder in results/
HELD_OUT, SEEDS, ROUNDS = 0.2, (0, 1), 30


def tune(
    name: str, method: Method, data: Data, engine: Engine, stop: Callable[[], bool], folder: Path = RESULTS
) -> float | None:
    """The chosen step size; None if there was no time. A problem without a grid has its step size from elsewhere."""
    problem = PROBLEMS[name]
    known = trials(name, method, folder)
    held = hold_out(data, HELD_OUT) if problem.grid else data
    for lr in problem.grid:
        for seed in SEEDS:
            if (lr, seed) in known:
                continue
            line = run(name, method, seed, ROUNDS, held, engine, stop, lr)
            if line is None:
                return None
            add(line, folder / TRIALS)
            known[lr, seed] = line
    return chosen(name, method, folder)


def trials(name: str, method: Method, folder: Path = RESULTS) -> dict[tuple[float, int], Line]:
    found = [one for one in lines(folder / TRIALS) if (one["problem"], one["method"]) == (name, method.name)]
    return {(one["lr"], one["seed"]): one for one in found}


def chosen(name: str, method: Method, folder: Path = RESULTS) -> float:
    problem, known = PROBLEMS[name], trials(name, method, folder)
    whole = [lr for lr in problem.grid if all((lr, seed) in known for seed in SEEDS)]
    if not whole:
        return problem.steps[method.kind]
    return min(whole, key=lambda lr: _badness([known[lr, seed] for seed in SEEDS], problem.target))


def _badness(runs: list[Line], target: float) -> tuple[float, float]:
    return mean(reached(one, target) for one in runs), -mean(mean(plain(one)[-5:] or [0.0]) for one in runs)


def plain(line: Line) -> list[float]:
    """Accuracies without the rounds whose scores were calibrated."""
    every = line["calibrated_every"]
    return [value for at, value in enumerate(line["accuracy"], 1) if not every or at % every]


def reached(line: Line, target: float) -> int:
    every = line["calibrated_every"]
    found = [at for at, value in enumerate(line["accuracy"], 1) if value >= target and not (every and at % every == 0)]
    return found[0] if found else line["rounds"] + 1
