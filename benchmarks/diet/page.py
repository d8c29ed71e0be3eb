"""docs/diet.md, made from the stored runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill

from benchmarks.readme import replaced

from .measure import Line, lines
from .methods import KINDS, METHODS, PROBLEMS

PAGE = Path(__file__).parents[2] / "docs" / "diet.md"
NAMES = {"digits": "digits", "fmnist": "Fashion-MNIST", "kws": "KWS"}
COMMAND = "python -m benchmarks.diet --page"
LAST = 5  # rounds whose mean is an accuracy


def spent(line: Line) -> list[float]:
    """Bytes up to every round, calibration apart."""
    found, total = [], 0.0
    for moved, apart in zip(line["bytes"], line["calibration_bytes"], strict=True):
        total += moved - apart
        found.append(total)
    return found


def curve(line: Line) -> list[float | None]:
    """Accuracies without the rounds whose scores were calibrated."""
    every = line["calibrated_every"]
    return [None if every and at % every == 0 else value for at, value in enumerate(line["accuracy"], 1)]


def at_bytes(line: Line, budget: float) -> float:
    """The mean accuracy of the last rounds that a budget pays for."""
    paid = sum(total <= budget * (1 + 1e-9) for total in spent(line))
    seen = [value for value in curve(line)[:paid] if value is not None][-LAST:]
    return mean(seen) if seen else 0.0


def final(line: Line) -> float:
    return at_bytes(line, float("inf"))


def calibrated(line: Line) -> float | None:
    """The accuracy of the last round with calibrated scores."""
    every = line["calibrated_every"]
    found = line["accuracy"][every - 1 :: every] if every else []
    return found[-1] if found else None


def to_target(line: Line, target: float) -> float | None:
    """Bytes until the first round at the target."""
    reached = [
        total for total, value in zip(spent(line), curve(line), strict=True) if value is not None and value >= target
    ]
    return reached[0] if reached else None


def spread(values: Sequence[float | None], scale: float = 100, places: int = 1) -> str:
    """Mean and deviation; a dash unless every seed has a value."""
    known = [scale * value for value in values if value is not None]
    if not known or len(known) < len(values):
        return "–"
    wide = f" ± {stdev(known):.{places}f}" if len(known) > 1 else ""
    return f"{mean(known):,.{places}f}{wide}"


def table(problem: str, stored: Sequence[Line]) -> str:
    """One row per method; the budget is what FedAvg spends in half of its rounds, and in all of them."""
    mine = {method.name: [one for one in stored if _is(one, problem, method.name)] for method in METHODS}
    base = mine["FedAvg"]
    if not base:
        return "Not run yet."
    whole, targets = mean(spent(one)[-1] for one in base), (PROBLEMS[problem].target, *PROBLEMS[problem].more)
    head = ["method", "seeds", "lr", "MB per round", "final, %", "calibrated, %", "at half of FedAvg's bytes, %"]
    head += [f"MB to {100 * target:g} %" for target in targets]
    rows = [head, ["---"] * len(head)]
    for name, runs in mine.items():
        if runs:
            moved = mean(spent(one)[-1] / one["rounds"] for one in runs) / 1e6
            cells = [spread([final(one) for one in runs]), spread([calibrated(one) for one in runs])]
            cells += [spread([at_bytes(one, whole / 2) for one in runs])]
            places = 1 if moved < 10 else 0
            cells += [spread([to_target(one, target) for one in runs], 1e-6, places) for target in targets]
            step = "/".join(f"{lr:g}" for lr in sorted({one["lr"] for one in runs}))
            rows.append([name, str(len(runs)), step, f"{moved:.2f}", *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def answer(stored: Sequence[Line]) -> str:
    """One line per problem: the cheapest FedOVA and the cheapest FedAvg to the target, and what FedAvg itself needs."""
    said = [*(_short(one, stored) for one in PROBLEMS), everywhere(stored), *(_higher(one, stored) for one in PROBLEMS)]
    return "\n".join(fill(f"- {one}", 120, subsequent_indent="  ") for one in said if one)


def costs_of(problem: str, stored: Sequence[Line], target: float | None = None) -> dict[str, dict[str, float]]:
    """MB to a target by kind and method, where every seed got there."""
    costs: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for method in METHODS:
        aim = target or PROBLEMS[problem].target
        found = [to_target(one, aim) for one in stored if _is(one, problem, method.name)]
        known = [one for one in found if one is not None]
        if known and len(known) == len(found):
            costs[method.kind][method.name] = mean(known) / 1e6
    return costs


def everywhere(stored: Sequence[Line]) -> str:
    """Is there a diet with which FedOVA beats every FedAvg, with a server step too, per byte on every problem?"""
    costs = {one: costs_of(one, stored) for one in PROBLEMS}
    known = [one for one in PROBLEMS if costs[one]["avg"] and costs[one]["ova"]]
    rivals = {one: min((*costs[one]["avg"].values(), *costs[one]["step"].values())) for one in known}
    diets = [method.name for method in METHODS if method.kind == "ova"]
    ahead = [name for name in diets if known and all(costs[p]["ova"].get(name, rivals[p]) < rivals[p] for p in known)]
    if not known:
        return ""
    where = ", ".join(NAMES[one] for one in known)
    left = [NAMES[one] for one in PROBLEMS if one not in known]
    rest = f" Open: {', '.join(left)}, which were not run." if left else ""
    found = f"yes, with {'; '.join(ahead)}" if ahead else "there is no such diet among these rows"
    return (
        "**Is there a diet with which FedOVA needs fewer bytes to the target than any FedAvg here, with a server step "
        f"too?** On {where}: {found}.{rest}"
    )


def _higher(problem: str, stored: Sequence[Line]) -> str:
    """Who is cheapest to higher targets."""
    said = []
    for target in PROBLEMS[problem].more:
        costs = costs_of(problem, stored, target)
        best = {kind: min(costs[kind].items(), key=lambda item: item[1]) for kind in ("ova", "step") if costs[kind]}
        if best:
            told = [f"{name} {cost:,.1f} MB" for name, cost in best.values()]
            told += [f"no {KINDS[kind]} with every seed" for kind in ("ova", "step") if kind not in best]
            said.append(f"to {100 * target:g} %, {' and '.join(told)}")
    return f"**Higher targets** on {NAMES[problem]}, the cheapest: {'; '.join(said)}." if said else ""


def _short(problem: str, stored: Sequence[Line]) -> str:
    costs = costs_of(problem, stored)
    if not costs["avg"] or not costs["ova"]:
        return ""
    ours, base = (min(costs[kind].items(), key=lambda item: item[1]) for kind in ("ova", "avg"))
    plain = costs["avg"].get("FedAvg")
    itself = "" if plain is None else f", FedAvg as it is {plain:,.1f}"
    if costs["step"]:
        name, cost = min(costs["step"].items(), key=lambda item: item[1])
        itself += f", {name} {cost:,.1f}"
    word = "ahead" if ours[1] < base[1] else "behind"
    return (
        f"**{NAMES[problem]}**, to {100 * PROBLEMS[problem].target:g} %: {ours[0]}, needs {ours[1]:,.1f} MB; the "
        f"cheapest FedAvg ({base[0]}) {base[1]:,.1f}{itself}. Per byte FedOVA is {word}.{_highest(problem, stored)}"
    )


def _highest(problem: str, stored: Sequence[Line]) -> str:
    """Which row is the highest at half of the bytes that FedAvg spends in all its rounds."""
    base = [spent(one)[-1] for one in stored if _is(one, problem, "FedAvg")]
    if not base:
        return ""
    runs = {method.name: [one for one in stored if _is(one, problem, method.name)] for method in METHODS}
    ends = {name: mean(at_bytes(one, mean(base) / 2) for one in some) for name, some in runs.items() if some}
    name = max(ends, key=lambda one: ends[one])
    return f" At half of FedAvg's bytes {name} is the highest ({100 * ends[name]:.1f} %)."


def _is(line: Line, problem: str, method: str) -> bool:
    planned = PROBLEMS[problem].rounds
    return bool((line["problem"], line["method"], line["rounds"]) == (problem, method, planned) and not line["failed"])


def text(page: str, stored: Sequence[Line]) -> str:
    """The page with its tables made anew."""
    page = replaced(page, "answer", answer(stored) + "\n", COMMAND, PAGE.name)
    for problem in PROBLEMS:
        page = replaced(page, problem, table(problem, stored) + "\n", COMMAND, PAGE.name)
    return page


def write() -> None:
    PAGE.write_text(text(PAGE.read_text("utf-8"), lines()), "utf-8")
