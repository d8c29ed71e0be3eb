"""Tables of one problem, from the lines that are stored."""

from __future__ import annotations

from statistics import mean, median, stdev
from typing import Any

from .choice import chosen, rank, ranked
from .grid import Grid, Method, Problem, Setting
from .store import Line, Store

NEVER = float("inf")
Runs = dict[str, list[Line]]  # by method, the runs of all seeds


def runs_of(grid: Grid, problem: Problem, store: Store) -> Runs:
    """The methods that were run on a problem with the setting that is chosen, in the order of the grid file."""
    found = {}
    for name in grid.methods:
        setting = chosen(grid, problem, store, name)
        lines = [line for line in store.of("run", problem.name, name) if line["setting"] == setting]
        found[name] = sorted(lines, key=lambda line: line["seed"])
    return {name: lines for name, lines in found.items() if lines}


def goals_of(problem: Problem) -> list[str]:
    return [f"test {goal:g}" for goal in problem.test] + [f"train {goal:g}" for goal in problem.train]


def said(goal: str) -> str:
    """test 0.9 as test 90 %."""
    which, value = goal.split()
    return f"{which} {100 * float(value):g} %"


def rounds_table(grid: Grid, goals: list[str], runs: Runs) -> str:
    """Rounds to each target: the median, and every seed; then how it ended."""
    head = ("method", *[f"rounds to {said(goal)}" for goal in goals])
    head += ("final, %", "mean of late rounds, %", "dropped", "diverged")
    rows = []
    for name, lines in runs.items():
        counts = [each(lines, goal) for goal in goals]
        finals = [percent([line[which] for line in lines]) for which in ("final", "final_late")]
        fell = sum(line["diverged"] for line in lines)
        rows.append((labelled(grid, name, lines), *counts, *finals, str(sum(line["dropped"] for line in lines)), fell))
    return table(head, rows)


def labelled(grid: Grid, name: str, lines: list[Line]) -> str:
    missing = len(lines) < len(grid.final["seeds"])
    return f"{name} ({len(lines)} of {len(grid.final['seeds'])} seeds)" if missing else name


def each(lines: list[Line], goal: str) -> str:
    seeds = ", ".join(number(spent(line, goal, "rounds")) for line in lines)
    return f"**{number(middle(lines, goal, 'rounds'))}** ({seeds})"


def costs_table(grid: Grid, goals: list[str], runs: Runs) -> str:
    """Medians of MB up and down together, example gradients and seconds; none of runs made beside others."""
    head = ("MB; 10⁶ gradients; seconds", *[f"to {said(goal)}" for goal in goals])
    return table(
        head, [(labelled(grid, name, lines), *[cost(lines, g) for g in goals]) for name, lines in runs.items()]
    )


def cost(lines: list[Line], goal: str) -> str:
    if middle(lines, goal, "rounds") == NEVER:
        return "-"
    alone = not any("jobs" in line for line in lines)
    seconds = f"{middle(lines, goal, 'seconds'):.1f}" if alone else "-"
    return f"{megabytes(lines, goal)}; {middle(lines, goal, 'gradients') / 1e6:.2f}; {seconds}"


def megabytes(lines: list[Line], goal: str) -> str:
    moved = middle(lines, goal, "bytes")
    return "-" if moved == NEVER else f"{moved / 1e6:,.0f}" if moved > 1e8 else f"{moved / 1e6:.1f}"


def spent(line: Line, goal: str, what: str) -> float:
    """What a run had spent when it first was at the goal; infinite if it never was."""
    there = line["to"][goal]
    if there is None:
        return NEVER
    found: float = there["up"] + there["down"] if what == "bytes" else there[what]
    return found


def middle(lines: list[Line], goal: str, what: str) -> float:
    """The median of the seeds; one that never got there counts as the worst."""
    return median(spent(line, goal, what) for line in lines)


def paired_table(grid: Grid, problem: Problem, goals: list[str], runs: Runs) -> str:
    """Differences to the method that a method is built on, seed by seed: mean and standard deviation."""
    rows = []
    for name, lines in runs.items():
        base = baseline(grid, problem, name, runs)
        if base is not None:
            cells = [difference(lines, runs[base], goal) for goal in goals]
            rows.append((labelled(grid, name, lines), base, *cells, points(lines, runs[base])))
    head = ("difference, seed by seed", "against", *[f"rounds to {said(goal)}" for goal in goals], "final, points")
    return table(head, rows) if rows else ""


def baseline(grid: Grid, problem: Problem, name: str, runs: Runs) -> str | None:
    wanted = "FedAvg" if problem.labels is not None else "FedAvg-SGD"
    if grid.methods[name].around == "fedova":
        wanted = "FedOVA"
    return wanted if wanted in runs and wanted != name else None


def pairs_of(lines: list[Line], others: list[Line]) -> list[tuple[Line, Line]]:
    return [(a, b) for a in lines for b in others if a["seed"] == b["seed"]]


def difference(lines: list[Line], others: list[Line], goal: str) -> str:
    gaps = [(spent(a, goal, "rounds"), spent(b, goal, "rounds")) for a, b in pairs_of(lines, others)]
    known = [a - b for a, b in gaps if NEVER not in (a, b)]
    few = f" ({len(known)} of {len(gaps)} pairs)" if len(known) < len(gaps) else ""
    return spread(known, 1) + few if known else "-"


def points(lines: list[Line], others: list[Line]) -> str:
    return spread([100 * (a["final"] - b["final"]) for a, b in pairs_of(lines, others)], 2)


def spread(values: list[float], places: int) -> str:
    return f"{mean(values):+.{places}f}" + (f" ± {stdev(values):.{places}f}" if len(values) > 1 else "")


def chosen_table(grid: Grid, problem: Problem, store: Store, runs: Runs) -> str:
    """The winner of the tuning and its runner-up."""
    if problem.like:
        return taken_table(problem, runs)
    rows = []
    for name in runs:
        first, second = ranked(grid, problem, store, name)[:2]
        found = setting(first[0]["setting"], grid.methods[name])
        rows.append((name, found, held_out(grid, first), setting(second[0]["setting"]), held_out(grid, second)))
    goal = f"rounds to {100 * problem.held_out:g} %, end, %"
    return table(("method", "chosen", f"held out: {goal}", "runner-up", f"held out: {goal}"), rows)


def taken_table(problem: Problem, runs: Runs) -> str:
    rows = [(name, setting(lines[0]["setting"])) for name, lines in runs.items()]
    return table(("method", f"setting, of `{problem.like}`: the highest held-out accuracy at the end"), rows)


def tuning_table(grid: Grid, problem: Problem, store: Store, runs: Runs) -> str:
    """Every setting that was tried, best first; methods with trials alone come last."""
    rows = []
    for name in dict.fromkeys([*runs, *grid.methods]):
        for lines in ranked(grid, problem, store, name):
            rows.append((name, setting(lines[0]["setting"]), lines[0]["rounds"], *held_out(grid, lines).split(", ")))
    head = ("method", "setting", "trained for, rounds", f"rounds to held-out {100 * problem.held_out:g} %")
    return table((*head, "held-out accuracy at the end, %"), rows)


def held_out(grid: Grid, lines: list[Line]) -> str:
    diverged, at, accuracy = rank(grid, lines)
    return f"{number(at)}, {'diverged' if diverged else f'{-100 * accuracy:.1f}'}"


def setting(values: Setting, method: Method | None = None) -> str:
    """Names and values; with the method, a star where a value is the smallest or largest that was tried."""
    return ", ".join(f"{name} {written(value)}{edge(name, value, method)}" for name, value in values.items())


def written(value: Any) -> str:
    """A number, a word, or a list of them."""
    if isinstance(value, list):
        return "/".join(map(written, value))
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def edge(name: str, value: Any, method: Method | None) -> str:
    """A star at the smallest and the largest number that was tried; words, lists and switches have no edge."""
    tried = [one[name] for one in method.settings if name in one] if method else []
    numbers = {one for one in tried if isinstance(one, int | float) and not isinstance(one, bool)}
    return "\\*" if len(numbers) > 1 and value in (min(numbers), max(numbers)) else ""


def number(value: float) -> str:
    return "-" if value == NEVER else f"{value:g}"


def percent(values: list[float | None]) -> str:
    known = [100 * value for value in values if value is not None]
    if not known:
        return "-"
    some = f" ({len(known)} of {len(values)} seeds)" if len(known) < len(values) else ""
    return f"{mean(known):.2f}" + (f" ± {stdev(known):.2f}" if len(known) > 1 else "") + some


def table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
