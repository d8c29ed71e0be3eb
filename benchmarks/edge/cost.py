"""What the simulation of the edge itself costs: `python -m benchmarks.edge.cost` writes results/cost.json.

Events of asynchronous training: 10,000 clients with one example each, 100 or 1,000 of them at work; CPU time of
everything but the training, after a first round that is not counted. The clock: CPU time of its own code against the
rest of the same rounds of workload B (docs/speed.md). One thread; medians of five repetitions, and all of them.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import fedge
from benchmarks.edge.measure import RESULTS
from fedge.algorithms.asynchronous import Asynchronous
from fedge.edge import Clock, FirstOf, Profiles
from fedge.edge.jobs import Stack
from fedge.engine import Simulator
from fedge.handle import parameters

FILE = RESULTS / "cost.json"
CLIENTS, REPEATS, AT_WORK = 10_000, 5, (100, 1000)
EVENTS: dict[str, Callable[[fedge.FedAvg], Asynchronous]] = {
    "FedBuff, buffer of 50": lambda inner: fedge.FedBuff(inner, buffer=50),
    "FedBuff, buffer of 10": lambda inner: fedge.FedBuff(inner, buffer=10),
    "FedAsync": lambda inner: fedge.FedAsync(inner),
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


def event(name: str, at_work: int, events: int = 4000) -> float:
    """Microseconds per event, beside the training."""
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((CLIENTS + 10, 6)).astype(np.float32), np.arange(CLIENTS + 10) % 3
    data = fedge.data.from_arrays(x[:CLIENTS], y[:CLIENTS], x[CLIENTS:], y[CLIENTS:])
    where = fedge.Federation(data, np.arange(CLIENTS).reshape(-1, 1))
    algorithm = EVENTS[name](fedge.FedAvg(fedge.models.mlp(6, (5,), 3, seed=0), epochs=1))
    going = Clock(Simulator(algorithm, where), where, Profiles("phone", spread=10.0))._events(algorithm)
    state, *_ = going.advance(algorithm.init(parameters(algorithm.model)), 0, 1, at_work)
    rounds = max(2, events // at_work)
    with Timed(Stack, "fold") as training:
        begin = time.process_time()
        for number in range(2, 2 + rounds):
            state, *_ = going.advance(state, 0, number, at_work)
        spent = time.process_time() - begin - training.spent
    return 1e6 * spent / (rounds * at_work)


def clock(policy: FirstOf | None, rounds: int = 200) -> dict[str, float]:
    """Milliseconds of the clock per round of the digits workload, and as a share of the rest of the round, in %."""
    data = fedge.data.load("digits")
    where = fedge.Federation(data, fedge.partition.labels_per_client(data.train_y, 100, labels=2, seed=0))
    algorithm = fedge.FedAvg(fedge.models.mlp(seed=0), lr=0.5, batch_size=10)
    link = Clock(Simulator(algorithm, where), where, Profiles("phone", spread=10.0), policy)
    observe = fedge.Observe(evaluate_every=rounds)
    with Timed(Clock, "ask") as outer, Timed(Simulator, "ask") as inner:
        begin = time.process_time()
        fedge.train(algorithm, where, rounds=rounds, cohort=20, seed=0, link=link, observe=observe)
        whole = time.process_time() - begin
    own = outer.spent - inner.spent
    return {"milliseconds": 1e3 * own / rounds, "percent": 100 * own / (whole - own)}


def measured() -> dict[str, Any]:
    torch.set_num_threads(1)
    events = {
        name: {str(at_work): [round(event(name, at_work), 1) for _ in range(REPEATS)] for at_work in AT_WORK}
        for name in EVENTS
    }
    clocks = {
        name: [{key: round(value, 3) for key, value in clock(policy).items()} for _ in range(REPEATS)]
        for name, policy in {"wait for all": None, "first 15 of 20": FirstOf(15)}.items()
    }
    about = {"torch": torch.__version__, "machine": platform.machine(), "threads": 1}
    return {"events": events, "clock": clocks, **about}


def stored(path: Path = FILE) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def events_table(found: dict[str, Any]) -> list[list[str]]:
    """Rows: the method; the median of the repetitions and their span, by the number at work."""

    def cell(values: list[float]) -> str:
        return f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})"

    head = ["microseconds per event", *(f"{int(count):,} at work" for count in next(iter(found["events"].values())))]
    return [head, *([name, *map(cell, by_count.values())] for name, by_count in found["events"].items())]


def clock_text(found: dict[str, Any]) -> str:
    told = []
    for name, runs in found["clock"].items():
        own, share = (median(run[key] for run in runs) for key in ("milliseconds", "percent"))
        told.append(f"*{name}*: {own:.2f} ms, {share:.0f} % of the rest of the round")
    about = f"torch {found['torch']}, {found['machine']}, {found['threads']} thread, CPU time"
    return f"{'; '.join(told)} (medians of {REPEATS}; {about})."


def main() -> None:
    FILE.write_text(json.dumps(measured(), indent=1) + "\n", "utf-8")
    for row in events_table(stored()):
        print(" | ".join(row))


if __name__ == "__main__":
    main()
