"""What the simulation of the edge itself costs: `python -m benchmarks.edge.cost` writes costs.json.

Events of asynchronous training: 10,000 clients with one example each, 100 or 1,000 of them at work; CPU time of
everything but the training, after a first round that is not counted; around FedOVA a client has two examples of
different labels, so it answers for two classes of ten. The clock: whole rounds (`benchmarks.edge.rounds`). One thread.

    python -m benchmarks.edge.cost            # all
    python -m benchmarks.edge.cost events     # or some of: events, rounds, rounds_a
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import fedge
from benchmarks.edge import rounds
from fedge.algorithms.asynchronous import Asynchronous
from fedge.edge import Clock, Profiles
from fedge.edge.jobs import Stack
from fedge.engine import Simulator
from fedge.handle import parameters

FILE = Path(__file__).parent / "costs.json"
CLIENTS, REPEATS, AT_WORK = 10_000, 7, (100, 1000)
TARGET = 50.0  # microseconds per event
CLASSES = 10


def _fedavg() -> fedge.FedAvg:
    return fedge.FedAvg(fedge.models.mlp(6, (5,), CLASSES, seed=0), epochs=1)


def _fedova() -> fedge.FedOVA:
    return fedge.FedOVA(fedge.FedAvg(fedge.models.mlp(6, (5,), 2, seed=0), epochs=1), classes=CLASSES)


EVENTS: dict[str, Callable[[], Asynchronous]] = {
    "FedBuff(FedAvg), buffer of 50": lambda: fedge.FedBuff(_fedavg(), buffer=50),
    "FedBuff(FedAvg), buffer of 10": lambda: fedge.FedBuff(_fedavg(), buffer=10),
    "FedAsync(FedAvg)": lambda: fedge.FedAsync(_fedavg()),
    "FedBuff(FedOVA), buffers of 4": lambda: fedge.FedBuff(_fedova(), buffer=4),
    "FedBuff(FedOVA), buffers of 1": lambda: fedge.FedBuff(_fedova(), buffer=1),
    "FedAsync(FedOVA)": lambda: fedge.FedAsync(_fedova()),
}


class Timed:
    """CPU seconds spent in a function while it is replaced by this."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.inner, self.spent = owner, name, getattr(owner, name), 0.0

    def __enter__(self) -> Timed:
        def timed(*given: Any, **named: Any) -> Any:
            begin = time.process_time()
            try:
                return self.inner(*given, **named)
            finally:
                self.spent += time.process_time() - begin

        setattr(self.owner, self.name, timed)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self.owner, self.name, self.inner)


def event(name: str, at_work: int, least: int = 10_000) -> float:
    """Microseconds per event, beside the training."""
    algorithm = EVENTS[name]()
    each = 1 if algorithm.rows is None else 2
    count, draw = CLIENTS * each, np.random.default_rng(0)
    x, y = draw.standard_normal((count + 10, 6)).astype(np.float32), np.arange(count + 10) % CLASSES
    data = fedge.data.from_arrays(x[:count], y[:count], x[count:], y[count:])
    where = fedge.Federation(data, np.arange(count).reshape(-1, each))
    going = Clock(Simulator(algorithm, where), where, Profiles("phone", spread=10.0))._events(algorithm)
    state, *_ = going.advance(algorithm.init(parameters(algorithm.base.model)), 0, 1, at_work)
    many = max(2, least // at_work)
    with Timed(Stack, "fold") as training:
        begin = time.process_time()
        for number in range(2, 2 + many):
            state, *_ = going.advance(state, 0, number, at_work)
        spent = time.process_time() - begin - training.spent
    return 1e6 * spent / (many * at_work)


def events() -> dict[str, dict[str, list[float]]]:
    """All take turns, so that a busy minute of the machine falls on all of them."""
    found: dict[str, dict[str, list[float]]] = {name: {str(count): [] for count in AT_WORK} for name in EVENTS}
    for _ in range(REPEATS):
        for name, by_count in found.items():
            for count in AT_WORK:
                by_count[str(count)].append(round(event(name, count), 1))
    return found


PARTS: dict[str, Callable[[], Any]] = {
    "events": events, "rounds": rounds.measured, "rounds_a": rounds.measured_a
}  # fmt: skip


def measured(parts: list[str]) -> dict[str, Any]:
    """These parts anew; the others as they are stored."""
    torch.set_num_threads(1)
    found = stored()
    for part in parts:
        found[part] = PARTS[part]()
    about = {"torch": torch.__version__, "machine": platform.machine(), "threads": 1}
    return {part: found[part] for part in PARTS} | about


def stored(path: Path = FILE) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def events_table(found: dict[str, Any]) -> list[list[str]]:
    """Rows: the method; the median of the repetitions and their span, by the number at work."""

    def cell(values: list[float]) -> str:
        return f"{median(values):.1f} ({min(values):.0f} to {max(values):.0f})"

    counts = [f"{count:,} at work" for count in AT_WORK]
    rows = [["microseconds per event", *counts, f"both: at most {TARGET:.0f}"]]
    for name, by_count in found["events"].items():
        met = "met" if worst(by_count) <= TARGET else "**missed**"
        rows.append([name, *(cell(by_count[str(count)]) for count in AT_WORK), met])
    return rows


def worst(by_count: dict[str, list[float]]) -> float:
    """The larger of the medians."""
    return max(median(values) for values in by_count.values())


def about(found: dict[str, Any]) -> str:
    return f"torch {found['torch']}, {found['machine']}, {found['threads']} thread, CPU time"


def main() -> None:
    found = measured(sys.argv[1:] or list(PARTS))
    FILE.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    for row in (*events_table(found), *rounds.table(found["rounds"])):
        print(" | ".join(row))


if __name__ == "__main__":
    main()
