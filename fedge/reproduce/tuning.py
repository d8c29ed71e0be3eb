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
import tomllib
from collections.abc import Collection, Iterable
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from fedge.experiment import ExperimentError
from fedge.reproduce.campaign import Campaign
from fedge.reproduce.jobs import Job, Setting, as_before, of_file
from fedge.reproduce.places import GRID, TUNE, files, root
from fedge.reproduce.store import Line, Store

TRIALS = "tune.jsonl"
MOST = 8  # settings a method
EIGHTHS = (1, 3, 8)  # of the rounds, after which the worse half is dropped
LAST = 5  # rounds of which the validation accuracy is the mean
SEED = 0


def scope(cell: str) -> str:
    """What a tuning is for: a data set if it is `fmnist-iid` or `fmnist-noniid`, else a cell: `fmnist-k1000`."""
    dataset, _, rest = cell.partition("-")
    return dataset if rest in ("iid", "noniid") else cell


def methods() -> list[str]:
    """All that are compared, by the names they have in grid.toml."""
    return list(tomllib.loads((root() / GRID).read_text("utf-8")))


def grid(method: str) -> list[Setting]:
    """The settings that are tried for a method: every combination of its lists in grid.toml."""
    axes = tomllib.loads((root() / GRID).read_text("utf-8")).get(method)
    if axes is None:
        raise ExperimentError(f"{GRID} has no settings for {method!r}: add a table with its name")
    found = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    if len(found) > MOST:
        raise ExperimentError(f"{GRID} has {len(found)} settings for {method!r}, at most {MOST} are tried")
    return found


def tune(
    campaign: Campaign, dataset: str, rounds: int | None = None, only: Collection[str] | None = None
) -> list[Line]:
    """Choose for every method of a data set, or some; returns the choices, which are stored beside the trials."""
    store = Store(campaign.out / TRIALS)
    choices = []
    for file in files(TUNE, dataset):
        for position, job in enumerate(of_file(TUNE, file, SEED, rounds)):
            if only is None or job.method in only:
                choices.append(_choose(campaign, store, file, position, job))
    return choices


def _choose(campaign: Campaign, store: Store, file: Path, position: int, job: Job) -> Line:
    alive, trials = grid(job.method), list[Line]()
    for eighths in EIGHTHS:
        budget = max(1, job.rounds * eighths // 8)
        scored = [(_trial(campaign, store, _with(file, position, job, one, budget), job.rounds), one) for one in alive]
        trials = [{"setting": setting, "rounds": budget, "validation": score} for score, setting in scored] + trials
        ranked = sorted(scored, key=lambda one: -one[0])  # stable: the first of equals
        alive = [setting for _, setting in ranked[: max(1, len(ranked) // 2)]]
    head: Line = {"kind": "choice", "dataset": job.dataset, "method": job.method, "rounds": job.rounds}
    head |= {} if scope(job.cell) == job.dataset else {"cell": job.cell}
    line: Line = head | {"key": _key({**head, "trials": trials}), "setting": alive[0], "trials": trials}
    if store.find(line["key"]) is None:
        store.add(line)
    for setting in grid(job.method):
        shutil.rmtree(
            campaign.out / "runs" / _folder(_with(file, position, job, setting, 1), job.rounds), ignore_errors=True
        )
    return line


def _trial(campaign: Campaign, store: Store, job: Job, budget: int) -> float:
    """The validation accuracy of a setting after so many rounds; 0 if it diverged."""
    line = campaign.run(job, store, _folder(job, budget))
    return 0.0 if line["failed"] else round(mean(line["test_accuracy"][-LAST:]), 5)


def _with(file: Path, position: int, job: Job, setting: Setting, rounds: int) -> Job:
    """The same job with a setting and a number of rounds."""
    return of_file(TUNE, file, SEED, rounds, lambda _, method: setting if method == job.method else {})[position]


def _folder(job: Job, budget: int) -> str:
    """The same for every number of rounds, so that a longer trial goes on where the shorter one ended."""
    plain = {**job.config, "train": {**job.config["train"], "rounds": 0}}
    plain["algorithm"] = as_before(plain["algorithm"])
    return f"tune-{budget}-{_key(plain)}"


def _key(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class Choices:
    """What tuning chose: after the most rounds; of equals, in the first of these stores, and there the newest.

    So a short trial of the command does not decide over the settings of whole runs.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.lines: dict[tuple[str, str], Line] = {}
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
            return []
        found = max(lines, key=lambda line: line.get("rounds", 0))  # the first of equals
        order = sorted(found.get("trials", []), key=lambda trial: (-trial["rounds"], -trial["validation"]))
        settings = [found["setting"], *(trial["setting"] for trial in order)]
        return [one for i, one in enumerate(settings) if one not in settings[:i]]
