"""docs/edge.md: its tables from the results, between markers; the text around them stays."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.edge import choice, cost, rounds
from benchmarks.edge.measure import EVEN, EVERYWHERE, PROBLEMS, TENFOLD, UNEVEN, WAITS, lines

PAGE = Path(__file__).parents[2] / "docs/edge.md"
WAITING = {  # what a method is compared with, if not with FedOVA
    "FedBuff": "FedAvg",
    "asynchronous FedOVA, buffers of 4, late mean": "FedOVA, late mean",
    "asynchronous FedOVA + spectral": "FedOVA + spectral",
}
TITLES = {"digits": "digits", "fmnist": "Fashion-MNIST", "kws": "key words"}


def write() -> None:
    text = PAGE.read_text()
    parts = {"fleets": fleets(), "asynchronous": asynchronous(), "choices": choices(), "costs": costs()}
    for name, table in parts.items():
        begin, end = f"<!-- {name}: python -m benchmarks.edge -->\n", f"<!-- /{name} -->"
        head, rest = text.split(begin)
        text = head + begin + table + end + rest.split(end, 1)[1]
    PAGE.write_text(text)


def found(problem: str, fleet: str, method: str) -> list[dict[str, Any]]:
    wanted = (problem, fleet, method)
    return [line for line in lines() if (line["problem"], line["fleet"], line["method"]) == wanted]


def measured() -> list[str]:
    """Problems with any result."""
    return [problem for problem in PROBLEMS if any(line["problem"] == problem for line in lines())]


def fleets() -> str:
    """By problem: seconds and joules to the target on every fleet."""
    parts = []
    for problem in measured():
        goal = f"{100 * PROBLEMS[problem].target:.0f} %"
        head = ["method", "final accuracy, %", "MB", *(f"{fleet}: s | {fleet}: J" for fleet in EVEN)]
        rows = [[method, *_cells(problem, method)] for method in EVERYWHERE if found(problem, EVEN[0], method)]
        parts += [f"{TITLES[problem]}, to {goal} test accuracy:\n", _table([head, *rows]), _best(problem, goal)]
    return "\n".join(parts)


def _cells(problem: str, method: str) -> list[str]:
    some = found(problem, EVEN[0], method)
    cells = [accuracy(some, problem), number(_taken(some, "megabytes_to"))]
    for fleet in EVEN:
        there = found(problem, fleet, method)
        cells += [f"{number(_taken(there, f'{what}_to'))}" for what in ("virtual_seconds", "joules")]
    return cells


def _best(problem: str, goal: str) -> str:
    """Which method is the fastest and which the thriftiest on every fleet, in a sentence each; none of one method."""
    told = []
    for fleet in EVEN:
        by = [_least(problem, fleet, f"{what}_to") for what in ("virtual_seconds", "joules")]
        if all(by):
            told.append(f"- {fleet}: the fastest is {by[0]}; the thriftiest is {by[1]}.")
    return "\n".join([*told, ""])


def _least(problem: str, fleet: str, what: str) -> str:
    """The best method, and whoever is nearer to it than two deviations of the seeds; empty if there are no two."""
    taken = {method: [line[what] for line in found(problem, fleet, method)] for method in EVERYWHERE}
    known = {method: values for method, values in taken.items() if values and None not in values}
    if len(known) < 2:
        return ""
    order = sorted(known, key=lambda method: mean(known[method]))
    first, near = order[0], list[str]()
    for method in order[1:]:
        wide = max((stdev(known[one]) for one in (first, method) if len(known[one]) > 1), default=0.0)
        near += [method] if mean(known[method]) - mean(known[first]) <= 2 * wide else []
    return f"**{first}**" + (f" (within the spread of the seeds: {', '.join(near)})" if near else "")


def asynchronous() -> str:
    """With a ten-fold spread of speeds: what not waiting saves."""
    parts = []
    for problem in measured():
        columns = (f"{fleet}: s to target | of waiting for all | s per round" for fleet in TENFOLD)
        head = ["method", "final accuracy, %", *columns]
        rows = [
            [method, accuracy(some, problem), *_saved(problem, method)]
            for method in UNEVEN
            if (some := found(problem, TENFOLD[0], method))
        ]
        parts += [f"{TITLES[problem]}, to {100 * PROBLEMS[problem].target:.0f} %:\n", _table([head, *rows])]
    return "\n".join(parts)


def _saved(problem: str, method: str) -> list[str]:
    """On every uneven fleet: seconds to the target, their share of those of the method that waits with the same seeds,
    and per round."""
    waits = "" if method in WAITS else WAITING.get(method, "FedOVA")
    cells = []
    for fleet in TENFOLD:
        some = found(problem, fleet, method)
        taken, share = _taken(some, "virtual_seconds_to"), _share(some, found(problem, fleet, waits))
        pace = number(mean(line["virtual_seconds"] / line["rounds"] for line in some)) if some else "not run"
        cells += [number(taken), share, pace]
    return cells


def _share(some: list[dict[str, Any]], waiting: list[dict[str, Any]]) -> str:
    """The seconds of some runs to the target over those of others, of the seeds that both have."""
    seeds = {line["seed"] for line in some} & {line["seed"] for line in waiting}
    taken, against = (
        _taken([line for line in lines if line["seed"] in seeds], "virtual_seconds_to") for lines in (some, waiting)
    )
    return "" if taken is None or against is None else f"{taken / against:.2f}"


def choices() -> str:
    """By problem with any result: how the settings of asynchronous FedOVA did on held-out data."""
    known = {line["problem"] for line in lines(choice.FILE)}
    return "\n".join(
        f"{TITLES[problem]}, to {100 * PROBLEMS[problem].target:.0f} %, held out:\n\n{_table(choice.rows(problem))}"
        for problem in PROBLEMS
        if problem in known
    )


def costs() -> str:
    """What the simulation of time costs, and whether that is within the targets."""
    known = cost.stored()
    events = {name: cost.worst(counts) for name, counts in known["events"].items()}
    longer = {name: max(rounds.shares(some)) for name, some in known["rounds"].items()}
    large = {name: rounds.share_a(some) for name, some in known["rounds_a"].items()}
    return (
        f"- An event of asynchronous training, in microseconds (at most {cost.TARGET:.0f}): "
        f"{_judged(events, cost.TARGET)}.\n"
        f"- The clock, in % of a round of workload B (at most {rounds.TARGET:.0f}): {_judged(longer, rounds.TARGET)}.\n"
        f"- The clock's own code, in % of the rest of a round of workload A on a CPU (at most {rounds.TARGET_A:.0f}): "
        f"{_judged(large, rounds.TARGET_A, 3)}.\n"
    )


def _judged(values: dict[str, float], target: float, digits: int = 1) -> str:
    """Who meets a target and who misses it, with the numbers."""
    met = [f"`{name}` {value:.{digits}f}" for name, value in values.items() if value <= target]
    missed = [f"`{name}` {value:.{digits}f}" for name, value in values.items() if value > target]
    told = [f"{word} by {', '.join(names)}" for word, names in (("met", met), ("**missed**", missed)) if names]
    return "; ".join(told)


def accuracy(some: list[dict[str, Any]], problem: str) -> str:
    """Mean and deviation, and of how many seeds if not of all."""
    values, planned = [100 * line["final"] for line in some], len(PROBLEMS[problem].seeds)
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{spread}" + (f" ({len(values)} of {planned} seeds)" if len(values) < planned else "")


def _taken(some: list[dict[str, Any]], name: str) -> float | None:
    """The mean over seeds; None unless every seed reached the target."""
    values = [line[name] for line in some]
    return None if not values or None in values else mean(values)


def number(value: float | None) -> str:
    """Three digits, or all before the point."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(rows: list[list[str]]) -> str:
    text = [f"| {' | '.join(row)} |" for row in rows]
    columns = text[0].count("|") - 1
    return "\n".join([text[0], "|" + " --- |" * columns, *text[1:]]) + "\n"
