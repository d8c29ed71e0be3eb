"""The grid file: problems, methods, settings, and the order of work."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GRID = Path(__file__).parent / "grid.toml"
Setting = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """Data, how they are dealt out, the model, and the accuracies that are waited for."""

    name: str
    data: str
    model: str
    clients: int
    cohort: int
    rounds: int  # of the final runs
    test: list[float]
    held_out: float = 1.0  # the accuracy that decides in tuning
    train: list[float] = field(default_factory=list)
    labels: int | None = None  # per client; None: IID
    like: str | None = None  # the problem whose settings it takes; it is not tuned itself
    round: float = 1.0  # a plain round, seconds, roughly


@dataclass(frozen=True)
class Method:
    """An algorithm, perhaps in FedOVA, and the settings of it that are tried."""

    name: str
    algorithm: str
    settings: list[Setting]
    fixed: Setting = field(default_factory=dict)
    around: str | None = None


@dataclass(frozen=True)
class Row:
    """A method on a problem: what one command works out."""

    problem: Problem
    method: Method

    @property
    def name(self) -> str:
        return f"{self.problem.name}/{self.method.name}"


@dataclass(frozen=True)
class Grid:
    problems: dict[str, Problem]
    methods: dict[str, Method]
    order: list[str]
    tuning: dict[str, Any]
    final: dict[str, Any]
    common: Setting
    cost: dict[str, float]

    def rows(self, name: str) -> list[Row]:
        """`all`, the rows of one problem, or one row; in the order of the file."""
        wanted = [one for one in self.order if name in ("all", one, one.split("/")[0])]
        if not wanted:
            raise SystemExit(f"unknown row {name!r}: give all, {', '.join(self.problems)}, or one of {self.order}")
        return [Row(self.problems[problem], self.methods[method]) for problem, method in (w.split("/") for w in wanted)]


def read(path: Path = GRID) -> Grid:
    tables = tomllib.loads(path.read_text())
    problems = {name: Problem(name, **table) for name, table in tables["problem"].items()}
    methods = {name: Method(name, **table) for name, table in tables["method"].items()}
    counts = {name: len(method.settings) for name, method in methods.items()}
    if len(set(counts.values())) > 1:
        raise SystemExit(f"every method must have the same number of settings: {counts}")
    rest = {name: tables[name] for name in ("tuning", "final", "common", "cost")}
    return Grid(problems, methods, tables["order"]["all"], **rest)
