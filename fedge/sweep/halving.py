"""Every method's step size and the like, chosen on a held-out part of the training set by successive halving.

    all of at most 8 settings for 1/8 of the rounds -> the better half for 3/8 -> the better half for all

One grid (grid.toml), one seed and one budget for every method; the test set is not touched: the files in tune/ hold a
validation part out. A choice is for all cells of a data set, but that of a file named after a cell for this one.

K. Jamieson and A. Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", AISTATS 2016.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from fedge.runs.differences import does_nothing
from fedge.sweep.entries import Entry, as_before, of_file
from fedge.sweep.files import TUNE, Files, Setting, scope
from fedge.sweep.runner import Runner, Stopped
from fedge.sweep.store import Line, Store

TRIALS = "tune.jsonl"
EIGHTHS = (1, 3, 8)  # of the rounds, after which the worse half is dropped
LAST = 5  # rounds of which the validation accuracy is the mean
SEED = 0
Backbones = Mapping[str, str | tuple[str, Mapping[str, str]]]  # method -> another one, and which of its fields is which


def tune(
    runner: Runner, files: Files, dataset: str, rounds: int | None = None, only: Collection[str] | None = None
) -> list[Line]:
    """Choose for every method of a data set, or some; returns the choices, which are stored beside the trials."""
    store = Store(runner.out / TRIALS)
    choices = []
    for file in files.of(TUNE, dataset):
        for position, entry in enumerate(of_file(files.name, TUNE, file, SEED, rounds)):
            if only is None or entry.method in only:
                made = partial(_with, files.name, file, position, entry)
                choices.append(_choose(runner, store, files.grid(entry.method), entry, made))
    return choices


def is_tuned(runner: Runner, files: Files, dataset: str, rounds: int | None, method: str) -> bool:
    """Whether every trial that tuning needs is stored."""
    probe = Runner(runner.out, runner.device, runner.engine, stop=lambda: True)
    try:
        tune(probe, files, dataset, rounds, [method])
    except Stopped:
        return False
    return True


def _choose(
    runner: Runner, store: Store, grid: list[Setting], entry: Entry, made: Callable[[Setting, int], Entry]
) -> Line:
    alive, trials = grid, list[Line]()
    for eighths in EIGHTHS:
        budget = max(1, entry.rounds * eighths // 8)
        scored = [(_trial(runner, store, made(one, budget), entry.rounds), one) for one in alive]
        trials = [{"setting": setting, "rounds": budget, "validation": score} for score, setting in scored] + trials
        ranked = sorted(scored, key=lambda one: -one[0])  # stable: the first of equals
        alive = [setting for _, setting in ranked[: max(1, len(ranked) // 2)]]
    head: Line = {"kind": "choice", "dataset": entry.dataset, "method": entry.method, "rounds": entry.rounds}
    head |= {} if scope(entry.cell) == entry.dataset else {"cell": entry.cell}
    line: Line = head | {"key": _key({**head, "trials": trials}), "setting": alive[0], "trials": trials}
    if store.find(line["key"]) is None:
        store.add(line)
    for setting in grid:
        shutil.rmtree(runner.out / "runs" / _folder(made(setting, 1), entry.rounds), ignore_errors=True)
    return line


def _trial(runner: Runner, store: Store, entry: Entry, budget: int) -> float:
    """The validation accuracy of a setting after so many rounds; 0 if it diverged."""
    line = runner.run(entry, store, _folder(entry, budget))
    return 0.0 if line["failed"] else round(mean(line["test_accuracy"][-LAST:]), 5)


def _with(name: str, file: Path, position: int, entry: Entry, setting: Setting, rounds: int) -> Entry:
    """The same entry with a setting and a number of rounds."""
    return of_file(name, TUNE, file, SEED, rounds, lambda _, method: setting if method == entry.method else {})[
        position
    ]


def _folder(entry: Entry, budget: int) -> str:
    """The same for every number of rounds, so that a longer trial goes on where the shorter one ended."""
    train = {name: value for name, value in entry.config["train"].items() if not does_nothing(name, value)}
    plain = {**entry.config, "train": train | {"rounds": 0}}
    plain["algorithm"] = as_before(plain["algorithm"])
    return f"tune-{budget}-{_key(plain)}"


def _key(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class Choices:
    """What tuning chose: after the most rounds; of equals, in the first of these stores, and there the newest.

    So a short trial of the command does not choose the settings of whole runs. A method that was never tuned takes what
    was chosen for the method whose `backbones` it shares, where needed under other names of the fields.
    """

    def __init__(self, paths: Iterable[Path], backbones: Backbones | None = None) -> None:
        self.lines: dict[tuple[str, str], Line] = {}
        self.backbones = dict(backbones or {})
        for path in reversed(list(paths)):
            for line in Store(path).lines:
                if line.get("kind") == "choice":
                    name = str(line.get("cell", line["dataset"])), str(line["method"])
                    if line.get("rounds", 0) >= self.lines.get(name, {}).get("rounds", 0):
                        self.lines[name] = line

    def __call__(self, cell: str, method: str) -> list[Setting]:
        """What was chosen, for this cell or else for its data set, and after it what would have been next: by rounds
        survived, then by score."""
        names = (cell, method), (cell.split("-")[0], method)
        lines = [self.lines[name] for name in names if name in self.lines]
        if not lines:
            return self._borrowed(cell, method) if method in self.backbones else []
        found = max(lines, key=lambda line: line.get("rounds", 0))  # the first of equals
        order = sorted(found.get("trials", []), key=lambda trial: (-trial["rounds"], -trial["validation"]))
        settings = [found["setting"], *(trial["setting"] for trial in order)]
        return [one for i, one in enumerate(settings) if one not in settings[:i]]

    def _borrowed(self, cell: str, method: str) -> list[Setting]:
        found = self.backbones[method]
        other, names = (found, dict[str, str]()) if isinstance(found, str) else found
        return [{names.get(field, field): value for field, value in one.items()} for one in self(cell, other)]
