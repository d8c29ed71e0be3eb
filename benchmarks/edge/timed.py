"""Stored runs of the yardstick (benchmarks/rounds), timed on every fleet without training anything again.

A server that waits for all trains the same model on whatever devices, and how long a round takes is decided by who is
drawn, what they hold and what is sent: the run's accuracies and a clock around a link that does nothing are enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

import fedge
from benchmarks.edge.measure import CLIENTS, COHORT, FLEETS, LABELS, PROBLEMS, Entry, built, setting, told
from benchmarks.rounds import grid, store
from fedge.core import Ask, At, Flow
from fedge.edge import Clock
from fedge.engine import Around, Simulator
from fedge.handle import parameters
from fedge.loop import cohorts

YARDSTICK = {  # of the methods here: what they are called there
    "FedAvg": "FedAvg",
    "FedAvg + spectral": "FedAvg + server spectral",
    "FedOVA": "FedOVA",
    "FedOVA + spectral": "FedOVA + server spectral",
}
Line = dict[str, Any]


class Silent(Around):
    """Asks nobody."""

    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Any:
        return {}, []


def lines(known: list[Entry]) -> Iterator[Line]:
    """All that can be said of stored runs and is not known yet."""
    for problem, method in ((problem, method) for problem in ("fmnist", "kws") for method in YARDSTICK):
        name = f"{problem}-l{LABELS}"
        for run in store.Store(store.RESULTS, store.RESULTS).of("run", name, YARDSTICK[method]):
            wanted = [Entry(problem, fleet, method, run["seed"]) for fleet in FLEETS]
            check(wanted[0], run)
            if missing := [entry for entry in wanted if entry not in known]:
                yield from _timed(missing, run)


def check(entry: Entry, run: Line) -> None:
    """Refuses a stored run with another setting than the command would train it with."""
    yardstick = grid.read()
    stored = {**yardstick.common, **yardstick.methods[YARDSTICK[entry.method]].fixed, **run["setting"]}
    here = setting(built(entry))
    if here != stored:
        name = f"{entry.problem}, {entry.method}, seed {entry.seed}"
        raise SystemExit(
            f"{name}: the stored run has {_words(stored)}, benchmarks/edge/measure.py has {_words(here)}: "
            "put the stored setting there"
        )


def _words(some: Line) -> str:
    return ", ".join(f"{name} {some[name]}" for name in sorted(some))


def _timed(entries: list[Entry], run: Line) -> Iterator[Line]:
    """One line per fleet."""
    problem, first = PROBLEMS[entries[0].problem], entries[0]
    data = fedge.data.load(problem.data)
    shares = fedge.partition.labels_per_client(data.train_y, clients=CLIENTS, labels=LABELS, seed=first.seed)
    federation = fedge.Federation(data, shares)
    algorithm = built(first)
    for entry in entries:
        clock = Clock(Silent(Simulator(algorithm, federation)), federation, FLEETS[entry.fleet])
        history = [
            record | {"test_accuracy": reached}
            for record, reached in zip(_rounds(clock, first.seed, run), run["accuracy"], strict=True)
        ]
        where = {"device": "timed", "torch": torch.__version__, "trained": run["device"], "setting": run["setting"]}
        yield {**asdict(entry), **told(history, problem.target), **where}


def _rounds(clock: Clock, seed: int, run: Line) -> Iterator[Line]:
    """Seconds, joules and bytes of every round; the first has what is set up before it as well."""
    algorithm, draw = clock.algorithm, cohorts(CLIENTS, COHORT)
    state = algorithm.init(parameters(algorithm.model))
    moved = _phase(clock, algorithm.setup(state), At(seed, 0, 0), torch.arange(CLIENTS))
    for number in range(1, run["rounds"] + 1):
        at = At(seed, number, 0)
        moved += _phase(clock, algorithm.round(state), at, draw(at))
        yield clock.notes() | {"up_bytes": moved, "down_bytes": 0}
        moved = 0


def _phase(clock: Clock, flow: Flow[Any], at: At, clients: Tensor) -> int:
    """The first phase of a flow passes on the clock; returns its bytes, both ways."""
    try:
        wanted = next(flow)
    except StopIteration:
        return 0
    asks = wanted if isinstance(wanted, tuple) else (wanted,)
    flow.close()
    clock.ask(at, asks, clients)
    works = [clock.load.of(ask, clients.numpy()) for ask in asks]
    return int(sum(work.down.sum() + work.up.sum() for work in works))
