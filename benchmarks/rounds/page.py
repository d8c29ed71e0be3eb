"""The tables of a page, from the lines that are stored."""

from __future__ import annotations

from statistics import mean, median, stdev
from typing import Any

from .grid import Grid, Problem, Setting
from .store import Line, Store
from .work import rank


def text(grid: Grid, store: Store) -> str:
    return "\n\n".join(section(grid, problem, store) for problem in grid.problems.values())


def section(grid: Grid, problem: Problem, store: Store) -> str:
    runs = {name: sorted(store.of("run", problem.name, name), key=lambda line: line["seed"]) for name in grid.methods}
    runs = {name: found for name, found in runs.items() if found}
    if not runs:
        return f"## {problem.name}\n\nNo results yet."
    goals = [f"test {goal:g}" for goal in problem.test] + [f"train {goal:g}" for goal in problem.train]
    parts = [
        f"## {problem.name}",
        rounds_table(goals, runs),
        costs_table(goals, runs),
        paired(grid, problem, goals, runs),
        tuning_table(grid, problem, store),
    ]
    return "\n\n".join(part for part in parts if part)


def rounds_table(goals: list[str], runs: dict[str, list[Line]]) -> str:
    head = (
        "method",
        *[f"rounds to {goal}" for goal in goals],
        "final, %",
        "mean of late rounds, %",
        "dropped",
        "seeds",
    )
    rows = []
    for name, lines in runs.items():
        state = f"{len(lines)}" + (f", {diverged} diverged" if (diverged := count_diverged(lines)) else "")
        counts = [reached([rounds_to(line, goal) for line in lines]) for goal in goals]
        finals = [percent([line[which] for line in lines]) for which in ("final", "final_late")]
        rows.append((name, *counts, *finals, str(sum(line["dropped"] for line in lines)), state))
    return table(head, rows)


def costs_table(goals: list[str], runs: dict[str, list[Line]]) -> str:
    """Medians of MB up and down, example gradients and seconds."""
    head = ("method: MB up / down, 10^6 gradients, seconds", *goals)
    rows = [(name, *[cost(lines, goal) for goal in goals]) for name, lines in runs.items()]
    return table(head, rows)


def cost(lines: list[Line], goal: str) -> str:
    there = [line["to"][goal] for line in lines]
    if None in there:
        return "-"
    up, down, gradients, seconds = (median(one[n] for one in there) for n in ("up", "down", "gradients", "seconds"))
    return f"{up / 1e6:.0f} / {down / 1e6:.0f}, {gradients / 1e6:.1f}, {seconds:.0f}"


def paired(grid: Grid, problem: Problem, goals: list[str], runs: dict[str, list[Line]]) -> str:
    """Differences in rounds to the method that a method is built on, seed by seed: mean and standard deviation."""
    rows = []
    for name, lines in runs.items():
        base = baseline(grid, problem, name, runs)
        if base is None:
            continue
        cells = [difference(lines, runs[base], goal) for goal in goals]
        rows.append((name, base, *cells))
    return table(("method", "against", *[f"rounds to {goal}, difference" for goal in goals]), rows) if rows else ""


def baseline(grid: Grid, problem: Problem, name: str, runs: dict[str, list[Line]]) -> str | None:
    wanted = "FedAvg" if problem.labels is not None else "FedAvg-SGD"
    if grid.methods[name].around == "fedova":
        wanted = "FedOVA"
    return wanted if wanted in runs and wanted != name else None


def difference(lines: list[Line], others: list[Line], goal: str) -> str:
    pairs = [(a, b) for a in lines for b in others if a["seed"] == b["seed"]]
    gaps = [(rounds_to(a, goal), rounds_to(b, goal)) for a, b in pairs]
    known = [a - b for a, b in gaps if a is not None and b is not None]
    if not known or len(known) < len(gaps):
        return "-"
    return f"{mean(known):+.1f}" + (f" ± {stdev(known):.1f}" if len(known) > 1 else "")


def tuning_table(grid: Grid, problem: Problem, store: Store) -> str:
    """Every setting that was tried, best first: rounds to the held-out target and held-out accuracy at the end."""
    rows = []
    for name in grid.methods:
        trials = store.of("trial", problem.name, name)
        last = {str(line["setting"]): line for line in sorted(trials, key=lambda line: line["rounds"])}
        if last:
            ranked = sorted(last.values(), key=lambda line: (-line["rounds"], rank(grid, line)))
            rows.append((name, "; ".join(tried(grid, line) for line in ranked)))
    head = ("method", f"settings: rounds to held-out {problem.held_out:g}, held-out accuracy after so many rounds")
    return table(head, rows) if rows else ""


def tried(grid: Grid, line: Line) -> str:
    diverged, at, accuracy = rank(grid, line)
    end = "diverged" if diverged else f"{-100 * accuracy:.1f} % after {line['rounds']}"
    return f"{setting(line['setting'])}: {'-' if at == float('inf') else at}, {end}"


def setting(values: Setting) -> str:
    return " ".join(f"{name} {value:g}" for name, value in values.items())


def count_diverged(lines: list[Line]) -> int:
    return sum(line["diverged"] for line in lines)


def rounds_to(line: Line, goal: str) -> int | None:
    there = line["to"][goal]
    return None if there is None else there["rounds"]


def reached(values: list[int | None]) -> str:
    """The median and the extremes; a seed that never got there counts as the worst."""
    known = sorted(float("inf") if value is None else value for value in values)
    middle = median(known)
    if middle == float("inf"):
        return "-"
    ends = [f"{value:g}" if value < float("inf") else "-" for value in (known[0], known[-1])]
    return f"{middle:g}" + (f" ({ends[0]} to {ends[1]})" if known[0] != known[-1] else "")


def percent(values: list[float | None]) -> str:
    known = [100 * value for value in values if value is not None]
    if not known:
        return "-"
    return f"{mean(known):.2f}" + (f" ± {stdev(known):.2f}" if len(known) > 1 else "")


def table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
