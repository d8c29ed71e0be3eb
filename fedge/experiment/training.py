"""The table [train] of an experiment file: one flat table for what `fedge.train` takes in groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_type_hints

from fedge.engine import Engine
from fedge.engine.runtime import Precision
from fedge.engine.ways import Way
from fedge.experiment.own import Own, find
from fedge.experiment.values import made
from fedge.hooks import Best, Observe, Plateau, Reached, Spent
from fedge.loop import Sampling
from fedge.metrics import Metric


@dataclass(frozen=True)
class Training:
    """The fields of [train]."""

    rounds: int
    cohort: int | None = None
    sampling: Sampling | None = None
    seed: int = 0
    device: str = "cpu"
    evaluate_every: int = 1
    evaluate_train: bool = False
    checkpoint_every: int = 10
    precision: Precision = "fp32"
    compile: bool | None = None
    chunk: int | None = None
    workers: int | None = None
    way: Way | None = None
    metrics: tuple[Metric, ...] = ()  # ["f1", "mine.py:recall"] are test_f1 and test_recall in the records
    per_client: bool = False
    keep: Literal["last", "best"] | Best = "last"
    until: Plateau | Reached | Spent | None = None


def engine_of(table: Mapping[str, Any]) -> Engine:
    return Engine(**{one.name: table[one.name] for one in fields(Engine) if one.name in table})


def observe_of(table: Mapping[str, Any]) -> Observe:
    given = {one.name: table[one.name] for one in fields(Observe) if one.name in table}
    given["metrics"] = dict(map(_metric, given.get("metrics", ())))
    hints = get_type_hints(Training)
    given |= {name: made(given[name], hints[name]) for name in ("keep", "until") if name in given}
    return Observe(**given)


def _metric(name: str) -> tuple[str, Any]:
    """What a metric is called in the records, and its function or the name of one of ours."""
    return (name.thing, find(name, "train: metrics")) if isinstance(name, Own) else (name, name)


def basics_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """rounds, cohort, sampling and seed, as `train` takes them."""
    return {name: table[name] for name in ("rounds", "cohort", "sampling", "seed") if name in table}
