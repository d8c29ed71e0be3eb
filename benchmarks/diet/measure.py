"""One training run as one JSON line: accuracy and bytes of every round, with and without calibrated scores."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import fedge
from fedge.data import Data
from fedge.engine import Engine, TooFewReplies
from fedge.sweep.hardware import hardware

from .methods import METHODS, PROBLEMS, Method

RESULTS = Path(__file__).parent / "results"
CLIENTS, COHORT = 100, 20
CALIBRATION = "moments"  # the task of `Calibrated`
Line = dict[str, Any]


def lines(folder: Path = RESULTS) -> list[Line]:
    found = [path.read_text("utf-8").splitlines() for path in sorted(folder.glob("*.jsonl"))]
    return [json.loads(line) for file in found for line in file]


def missing(problem: str, seeds: tuple[int, ...], rounds: int, folder: Path) -> Iterator[tuple[Method, int]]:
    """What is not stored yet, all methods of a seed before the next seed."""
    done = {(line["problem"], line["method"], line["seed"], line["rounds"]) for line in lines(folder)}
    for seed in seeds:
        for method in METHODS:
            if (problem, method.name, seed, rounds) not in done:
                yield method, seed


def run(
    name: str,
    method: Method,
    seed: int,
    rounds: int,
    data: Data,
    engine: Engine,
    stop: Callable[[], bool],
    lr: float | None = None,
) -> Line | None:
    """The line of a finished run; None if it was stopped."""
    problem = PROBLEMS[name]
    lr = lr or problem.steps[method.kind]
    parts = fedge.partition.labels_per_client(data.train_y, CLIENTS, labels=problem.labels, seed=seed)
    algorithm, began = method.build(problem, seed, lr), time.perf_counter()
    records: list[Line] = []
    options: dict[str, Any] = {"rounds": rounds, "cohort": COHORT, "seed": seed, "engine": engine, "stop": stop}
    failed, moved = None, [0] * rounds
    with suppress(TooFewReplies):
        done = fedge.train(algorithm, fedge.Federation(data, parts), **options, on_round=records.append)
        if done.stopped:
            return None
        for row in done.ledger:
            moved[row.round - 1] += (row.up + row.down) * (row.task == CALIBRATION)
    if len(records) < rounds:
        failed = f"too few finite uploads after round {len(records)}"
    every = problem.every if method.kind == "ova" else None
    return {
        "problem": name,
        "method": method.name,
        "kind": method.kind,
        "width": method.width,
        "bits": method.bits,
        "seed": seed,
        "rounds": rounds,
        "failed": failed,
        "lr": lr,
        "calibrated_every": every,
        "accuracy": [round(record["test_accuracy"], 5) for record in records],
        "bytes": [record["up_bytes"] + record["down_bytes"] for record in records],
        "calibration_bytes": moved,
        "seconds": round(time.perf_counter() - began, 1),
        "hardware": hardware(str(engine.device)),
        "precision": engine.precision,
        "torch": torch.__version__,
    }


def add(line: Line, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{line['problem']}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
