"""docs/attacks.md: its tables from `results/*/attacks.jsonl`, between markers; the text around them stays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.uploads.page import filled, table
from fedge.attacks import KINDS
from fedge.attacks.study import DEFENCES, MEAN, NONE, RECOMMENDED

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs/attacks.md"
PROBLEMS = ("digits", "fmnist")
SHARES = (0.1, 0.2)
SEEDS = (0, 1, 2)
COMMAND = "python -m benchmarks.attacks"


def write() -> None:
    text = PAGE.read_text()
    for problem in PROBLEMS:
        text = filled(text, problem, COMMAND, tables(problem))
    text = filled(text, "seeds", COMMAND, seeds(PROBLEMS[0]))
    PAGE.write_text(filled(text, "worst", COMMAND, worst(PROBLEMS[0])))


def lines(problem: str, seed: int = 0) -> list[dict[str, Any]]:
    """The results with one seed: all tables are of the first, `seeds` compares it with others."""
    file = RESULTS / problem / "attacks.jsonl"
    every = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [one for one in every if one["seed"] == seed]


def found(some: Sequence[dict[str, Any]], label: str, kind: str, share: float, defence: str) -> list[dict[str, Any]]:
    wanted = (label, kind, 0.0 if kind == NONE else share, defence)
    return [one for one in some if (one["algorithm"], one["kind"], one["share"], one["defence"]) == wanted]


def cell(some: Sequence[dict[str, Any]]) -> str:
    """The mean over seeds; of a back door, in brackets, how often it opened."""
    if not some:
        return "not run"
    if any(one["final"] is None for one in some):
        return "collapses"
    value = f"{100 * mean(one['final'] for one in some):.1f}"
    if some[0]["kind"] != "backdoor":
        return value
    return f"{value} ({100 * mean(one['opened'] for one in some):.0f})"


def tables(problem: str) -> str:
    some = lines(problem)
    if not some:
        return "Not run yet.\n"
    text = []
    for label in dict.fromkeys(one["algorithm"] for one in some):
        for share in SHARES:
            rows = [[f"{label}, {100 * share:.0f} % lie", *DEFENCES]]
            for kind in (NONE, *KINDS):
                rows.append([kind, *(cell(found(some, label, kind, share, defence)) for defence in DEFENCES)])
            text.append(table(rows))
    return "\n".join(text)


def worst(problem: str) -> str:
    """The most that any attack costs, in points, against honest clients without a defence."""
    some = lines(problem)
    rows = [
        ["the worst attack costs, points", *(f"{d}, {100 * s:.0f} % lie" for d in (MEAN, RECOMMENDED) for s in SHARES)]
    ]
    for label in dict.fromkeys(one["algorithm"] for one in some):
        rows.append([label, *(_cost(some, label, d, s) for d in (MEAN, RECOMMENDED) for s in SHARES)])
    return table(rows)


def seeds(problem: str) -> str:
    """What the worst attack by a tenth costs under the recommended rule, seed by seed, and the second worst."""
    some = {seed: found for seed in SEEDS if (found := lines(problem, seed))}
    rows = [["bounded_mean, 10 % lie: the two worst attacks cost, points", *(f"seed {seed}" for seed in some)]]
    for label in dict.fromkeys(one["algorithm"] for one in some[0]):
        costs = (_costs(of_seed, label, RECOMMENDED, SHARES[0])[:2] for of_seed in some.values())
        rows.append([label, *(", ".join(f"{cost:.1f} ({kind})" for cost, kind in two) for two in costs)])
    return table(rows)


def _cost(some: Sequence[dict[str, Any]], label: str, defence: str, share: float) -> str:
    cost, kind = _costs(some, label, defence, share)[0]
    return f"{cost:.1f} ({kind})"


def _costs(some: Sequence[dict[str, Any]], label: str, defence: str, share: float) -> list[tuple[float, str]]:
    """Points and attack, the worst first."""
    honest = mean(one["final"] for one in found(some, label, NONE, 0.0, MEAN))
    left = {kind: found(some, label, kind, share, defence) for kind in KINDS}
    costs = [(100 * (honest - mean(one["final"] or 0.0 for one in ones)), kind) for kind, ones in left.items() if ones]
    return sorted(costs, reverse=True)
