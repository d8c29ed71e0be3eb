"""Tune every method on held-out data, run what is chosen with three seeds, and look at its curvature."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

import fedge
from benchmarks.algorithms.methods import Method, Setting
from fedge.data import Data
from fedge.engine import TooFewReplies

CLIENTS, COHORT, ROUNDS, TUNING_ROUNDS, LAST = 100, 20, 40, 20, 5
SEEDS = (0, 1, 2)
TARGETS = (0.85, 0.90, 0.95)
HELD_OUT = {"IID": 0.90, "two labels": 0.85}  # the accuracy that decides in tuning
CONFIG = {"data": "digits", "clients": CLIENTS, "cohort": COHORT, "rounds": ROUNDS, "tuning_rounds": TUNING_ROUNDS}
WATCHED = ("cos_sy", "length_sy", "cos_step", "length_step", "step_update", "step_last", "candidate", "damping")
Line = dict[str, Any]


def federation(problem: str, data: Data, seed: int) -> fedge.Federation:
    if problem == "IID":
        return fedge.Federation(data, fedge.partition.iid(data.train_y, CLIENTS, seed=seed))
    return fedge.Federation(data, fedge.partition.labels_per_client(data.train_y, CLIENTS, labels=2, seed=seed))


def train(method: Method, setting: Setting, problem: str, data: Data, rounds: int, seed: int) -> Line:
    """One run: its curve, bytes and what the algorithm notes; a run that diverges keeps what it had."""
    records: list[dict[str, Any]] = []
    options: dict[str, Any] = {"rounds": rounds, "cohort": COHORT, "seed": seed, "on_round": records.append}
    with suppress(TooFewReplies):
        fedge.train(method.build(seed, **setting), federation(problem, data, seed), **options)
    curve = [round(record["test_accuracy"], 4) for record in records]
    moved = [record["up_bytes"] + record["down_bytes"] for record in records]
    fell = len(curve) < rounds or not math.isfinite(records[-1]["test_loss"]) or curve[-1] < max(curve) / 2
    return {
        "problem": problem,
        "method": method.name,
        "setting": setting,
        "seed": seed,
        "accuracy": curve,
        "bytes": moved,
        "diverged": fell,
        "watched": {name: watched(records, name) for name in WATCHED if any(name in one for one in records)},
        "pairs": [records[-1].get(f"{kind}_pairs") for kind in ("accepted", "refused")] if records else [None, None],
    }


def watched(records: list[dict[str, Any]], name: str) -> list[float]:
    """The 10th, 50th and 90th percentile of what was noted."""
    values = [record[name] for record in records if name in record]
    return [float(f"{value:.4g}") for value in np.percentile(values, (10, 50, 90))]


def first_at(curve: list[float], target: float) -> float:
    """The first round with this accuracy, infinite if there is none."""
    return next((t for t, value in enumerate(curve, 1) if value >= target), math.inf)


def end(line: Line) -> float:
    return 0.0 if line["diverged"] else float(np.mean(line["accuracy"][-LAST:]))


def rank(line: Line) -> tuple[bool, float, float]:
    """Fewest rounds to the held-out target first, then the highest end."""
    return line["diverged"], first_at(line["accuracy"], HELD_OUT[line["problem"]]), -end(line)


def chosen(trials: list[Line]) -> Setting:
    best: Setting = min(trials, key=rank)["setting"]
    return best


def work(method: Method, problem: str, data: Data, held_out: Data) -> Iterator[Line]:
    """Eight trials with seed 0 on four fifths of the training set, then three runs on all of it."""
    trials = [train(method, setting, problem, held_out, TUNING_ROUNDS, 0) for setting in method.grid]
    for trial in trials:
        yield {"kind": "trial", **{name: trial[name] for name in trial if name not in ("bytes", "watched", "pairs")}}
    for seed in SEEDS:
        yield {"kind": "run", **train(method, chosen(trials), problem, data, ROUNDS, seed)}
