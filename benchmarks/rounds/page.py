"""docs/second-order.md, its page of tables and two parts of README.md: marked blocks, made of stored results alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.readme import README, replaced

from . import grid, store
from .aims import aims
from .curvature import RESULT as CURVATURE
from .findings import Findings
from .tables import (
    chosen_table,
    costs_table,
    each,
    goals_of,
    labelled,
    megabytes,
    paired_table,
    percent,
    rounds_table,
    runs_of,
    table,
    tuning_table,
)

PAGE = Path(__file__).parents[2] / "docs" / "second-order.md"
TABLES = PAGE.with_name("second-order-tables.md")
FIGURE = PAGE.parent / "images" / "second-order.png"
COMMAND = "python -m benchmarks.rounds --page"
DIGITS_GRID, DIGITS = Path(__file__).parent / "digits.toml", Path(__file__).parent / "digits"
DIGITS_COMMAND = "python -m benchmarks.rounds --grid benchmarks/rounds/digits.toml --results benchmarks/rounds/digits"
LABELS = {  # of `fedge run`
    "FedAvg": "FedAvg",
    "FedOVA": "FedOVA",
    "FedOVA + spectral": "FedOVA + server spectral",
    "FedAvg + spectral": "FedAvg + server spectral",
}
TITLES = {
    "fmnist-iid": "Fashion-MNIST, IID",
    "fmnist-l2": "Fashion-MNIST, two labels per client",
    "kws-iid": "KWS, IID",
    "kws-l2": "KWS, two labels per client",
    "fmnist-l2-long": "Fashion-MNIST, two labels per client, 200 rounds",
    "fmnist-k1000": "Fashion-MNIST, two labels per client, 1,000 clients",
    "fmnist-l3": "Fashion-MNIST, three labels per client",
    "fmnist-l5": "Fashion-MNIST, five labels per client",
    "kws-l2-long": "KWS, two labels per client, 200 rounds",
    "kws-k500": "KWS, two labels per client, 500 clients",
    "kws-l3": "KWS, three labels per client",
    "kws-l5": "KWS, five labels per client",
    "digits": "Digits, two labels per client",
}


def published() -> Findings:
    return Findings(grid.read(), store.Store(store.RESULTS))


def digits() -> Findings:
    return Findings(grid.read(DIGITS_GRID), store.Store(DIGITS, DIGITS))


def text(found: Findings) -> str:
    """The tables of every problem that has runs."""
    shown = [section(found, problem) for problem in found.grid.problems.values() if found.runs(problem.name)]
    return "\n\n".join([*shown, not_run(found)])


def section(found: Findings, problem: grid.Problem, command: str = "") -> str:
    known, runs, goals = found.grid, runs_of(found.grid, problem, found.store), goals_of(problem)
    parts = [
        f"### {TITLES.get(problem.name, problem.name)}",
        f"`{command or f'python -m benchmarks.rounds {problem.name}'}`; {problem.rounds} rounds.",
        rounds_table(known, goals, runs),
        costs_table(known, goals, runs),
        paired_table(known, problem, goals, runs),
        chosen_table(known, problem, found.store, runs),
    ]
    return "\n\n".join(part for part in parts if part)


def not_run(found: Findings) -> str:
    """One line: the rows that have no run yet, or too few."""
    left: dict[str, list[str]] = {}
    for row in found.grid.rows("all"):
        lines = found.runs(row.problem.name).get(row.method.name, [])
        if len(lines) < len(found.grid.final["seeds"]):
            tried = " (trials alone)" if found.store.of("trial", row.problem.name, row.method.name) else ""
            name = labelled(found.grid, row.method.name, lines) if lines else row.method.name + tried
            left.setdefault(TITLES.get(row.problem.name, row.problem.name), []).append(name)
    told = "; ".join(f"*{title}*: {', '.join(names)}" for title, names in left.items())
    return f"Not run yet: {told}." if left else "Every row of the grid was run."


def tried(found: Findings) -> str:
    problems = [one for one in found.grid.problems.values() if found.runs(one.name) and not one.like]
    return "\n\n".join(
        f"### Tried: {TITLES.get(problem.name, problem.name)}\n\n"
        + tuning_table(found.grid, problem, found.store, found.runs(problem.name))
        for problem in problems
    )


def seconds(found: Findings) -> str:
    """Seconds per round, and as a multiple of the baseline's: methods that had the device to themselves."""
    rows = []
    for problem in found.grid.problems.values():
        known = {name: found.per_round(problem.name, name) for name in found.grid.methods}
        own = {name: value for name, value in known.items() if value is not None}
        base = next((own[name] for name in ("FedAvg-SGD", "FedOVA") if name in own), None)
        for name, value in own.items():
            times = f"{value / base:.1f}" if base else ""
            rows.append((TITLES.get(problem.name, problem.name), name, f"{value:.3f}", times))
    return table(("problem", "method", "seconds per round", "times the baseline's"), rows)


def curvature(result: dict[str, Any]) -> str:
    rows = [
        (run["method"], run["clients"], f"{run['damping']:g}", *[span(run[name]) for name in MEASURED])
        for run in result["runs"]
    ]
    head = ("method", "clients", "damping", "cos(s, y)", "\\|y\\| / \\|s\\|", "cos(step, -g)", "\\|step\\| / \\|g\\|")
    return table(head, rows)


MEASURED = ("cos_sy", "length_sy", "cos_step", "length_step")


def span(values: list[float]) -> str:
    low, middle, high = values
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


Blocks = dict[str, Callable[[], str]]


def blocks() -> dict[Path, Blocks]:
    """By page: its marked blocks."""
    read: Blocks = {
        "answer": lambda: published().answer(),
        "aims": lambda: aims(published()),
        "seconds": lambda: seconds(published()),
        "curvature": lambda: curvature(json.loads(CURVATURE.read_text())),
    }
    checked: Blocks = {
        "problems": lambda: text(published()),
        "digits": lambda: section(digits(), digits().grid.problems["digits"], DIGITS_COMMAND),
        "tried": lambda: tried(published()) + "\n\n" + tried(digits()),
    }
    return {PAGE: read, TABLES: checked}


def filled(path: Path, page: str) -> str:
    for name, body in blocks()[path].items():
        page = replaced(page, name, body() + "\n", COMMAND, path.name)
    return page


def readme() -> str:
    page = README.read_text("utf-8")
    answer = published().short().replace("](", "](docs/")
    for name, body in (("second-order", answer), ("digits", readme_table(digits()))):
        page = replaced(page, name, body + "\n", COMMAND, README.name)
    return page


def readme_table(found: Findings) -> str:
    """The algorithms of fedge/default.toml and the best first-order rival, with three seeds."""
    runs, goals = found.runs("digits"), ("test 0.85", "test 0.95")
    rows = []
    for label, name in {**LABELS, "FedAvgM (not in `make run`)": "FedAvgM"}.items():
        lines = runs[name]
        moved = median((line["spent"]["up"] + line["spent"]["down"]) / len(line["accuracy"]) for line in lines)
        ended = percent([line["final"] for line in lines])
        rows.append(
            (label, ended, *[each(lines, goal) for goal in goals], megabytes(lines, goals[0]), f"{moved / 1e6:.2f}")
        )
    head = ("algorithm", "final test accuracy, %", "rounds to 85 %", "rounds to 95 %", "MB to 85 %", "MB per round")
    return table(head, rows)


def write() -> None:
    from .figure import draw

    draw(published(), FIGURE)
    for path in blocks():
        path.write_text(filled(path, path.read_text("utf-8")), "utf-8")
    README.write_text(readme(), "utf-8")
