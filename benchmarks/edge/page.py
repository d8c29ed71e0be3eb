"""docs/edge.md: its tables from the results, between markers; the text around them stays."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.edge import choice, cost, partial, rounds
from benchmarks.edge.measure import EVEN, EVERYWHERE, PROBLEMS, TENFOLD, UNEVEN, WAITS, lines

Line = dict[str, Any]
PAGE = Path(__file__).parents[2] / "docs/edge.md"
WAITING = {  # what a method is compared with, if not with FedOVA
    "FedBuff": "FedAvg",
    "asynchronous FedOVA, late mean": "FedOVA, late mean",
    "asynchronous FedOVA, buffers of 4, late mean": "FedOVA, late mean",
    "asynchronous FedOVA + spectral": "FedOVA + spectral",
}
SAVES = ("asynchronous FedOVA", "asynchronous FedOVA, late mean", "asynchronous FedOVA, buffers of 4, late mean")
TITLES = {"digits": "digits", "fmnist": "Fashion-MNIST", "kws": "key words"}


def write() -> None:
    text = PAGE.read_text()
    for name, table in parts().items():
        begin, end = f"<!-- {name}: python -m benchmarks.edge -->\n", f"<!-- /{name} -->"
        head, rest = text.split(begin)
        text = head + begin + table + end + rest.split(end, 1)[1]
    PAGE.write_text(text)


def parts() -> dict[str, str]:
    """What is made from stored results, by the name of its marks."""
    made = {"fleets": fleets(), "asynchronous": asynchronous(), "energy": energy(), "choices": choices()}
    return {**made, "partial": _table(partial.rows()), "costs": costs()}


def found(problem: str, fleet: str, method: str, stored: list[Line] | None = None) -> list[Line]:
    wanted, some = (problem, fleet, method), lines() if stored is None else stored
    return [line for line in some if (line["problem"], line["fleet"], line["method"]) == wanted]


def measured(stored: list[Line]) -> list[str]:
    """Problems with any result."""
    return [problem for problem in PROBLEMS if any(line["problem"] == problem for line in stored)]


def fleets() -> str:
    """By problem: seconds and joules to the target on the three fleets."""
    return on_fleets(EVEN, lines())


def on_fleets(fleets: list[str], stored: list[Line]) -> str:
    """By problem: seconds and joules to the target on every fleet, of stored lines."""
    parts, first = [], fleets[0]
    for problem in measured(stored):
        goal = f"{100 * PROBLEMS[problem].target:.0f} %"
        known = [method for method in EVERYWHERE if found(problem, first, method, stored)]
        head = ["method", f"{first}: final accuracy, %", f"{first}: MB", *(f"{one}: s | {one}: J" for one in fleets)]
        rows = [[method, *_cells(problem, method, fleets, stored)] for method in known]
        title = f"{TITLES[problem]}, to {goal} test accuracy{_missing(EVERYWHERE, known)}:\n"
        parts += [title, _table([head, *rows]), _best(problem, fleets, stored)]
    return "\n".join(parts)


def _missing(planned: tuple[str, ...], known: list[str]) -> str:
    """Which methods of a table have no row."""
    left = [method for method in planned if method not in known]
    return f" (not run: {'; '.join(left)})" if left else ""


def _cells(problem: str, method: str, fleets: list[str], stored: list[Line]) -> list[str]:
    some = found(problem, fleets[0], method, stored)
    cells = [accuracy(some, problem), number(_taken(some, "megabytes_to"))]
    for fleet in fleets:
        there = found(problem, fleet, method, stored)
        cells += [number(_taken(there, "virtual_seconds_to")), number(_taken(there, "joules_to") or None)]
    return cells  # no energy is not known


def _best(problem: str, fleets: list[str], stored: list[Line]) -> str:
    """Which method is the fastest and which the thriftiest on every fleet, in a sentence each; none of one method."""
    told = []
    for fleet in fleets:
        by = [_least(problem, fleet, f"{what}_to", stored) for what in ("virtual_seconds", "joules")]
        words = [f"the {what} is {one}" for what, one in zip(("fastest", "thriftiest"), by, strict=True) if one]
        told += [f"- {fleet}: {'; '.join(words)}."] if words else []
    return "\n".join([*told, ""])


def _least(problem: str, fleet: str, what: str, stored: list[Line]) -> str:
    """The best method, and whoever is nearer to it than two deviations of the seeds; empty if there are no two."""
    taken = {method: [line[what] for line in found(problem, fleet, method, stored)] for method in EVERYWHERE}
    known = {method: values for method, values in taken.items() if values and all(values)}  # 0 J are not known
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
    for problem in measured(lines()):
        columns = (f"{fleet}: s to target | of waiting for all | s per round" for fleet in TENFOLD)
        head = ["method", f"{TENFOLD[0]}: final accuracy, %", *columns]
        known = {method: some for method in UNEVEN if (some := found(problem, TENFOLD[0], method))}
        rows = [[method, accuracy(some, problem), *_saved(problem, method)] for method, some in known.items()]
        title = f"{TITLES[problem]}, to {100 * PROBLEMS[problem].target:.0f} %{_missing(UNEVEN, list(known))}:\n"
        parts += [title, _table([head, *rows])]
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


def energy() -> str:
    """What not waiting saves in joules on LTE with a ten-fold spread: the share of FedOVA's to the target."""
    told = [f"- {TITLES[problem]}: {_joules(problem)}.\n" for problem in measured(lines())]
    return "".join(told)


def _joules(problem: str) -> str:
    """By form of asynchronous FedOVA that reaches the target: the share of the sums, and that of every seed."""
    waits, told = _joules_to(problem, "FedOVA"), list[str]()
    for method in SAVES:
        taken = {seed: joules for seed, joules in _joules_to(problem, method).items() if seed in waits}
        if taken:
            share = sum(taken.values()) / sum(waits[seed] for seed in taken)
            seeds = ", ".join(f"{seed}: {taken[seed] / waits[seed]:.2f}" for seed in sorted(taken))
            told.append(f"{method} {share:.2f} (seed {seeds})")
    return "; ".join(told)


def _joules_to(problem: str, method: str) -> dict[int, float]:
    """By seed that reaches the target."""
    some = found(problem, TENFOLD[0], method)
    return {line["seed"]: line["joules_to"] for line in some if line["joules_to"] is not None}


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
