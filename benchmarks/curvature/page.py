"""The numbers of docs/curvature.md: marked blocks, written from the stored results and nowhere else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import mean, median, stdev
from textwrap import fill
from typing import Any

from benchmarks.theory.page import table

from .measure import HELD_OUT, TARGETS, chosen, end, first_at
from .methods import METHODS, PRINTED

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs" / "curvature.md"
TITLES = {"IID": "Digits, all labels at every client", "two labels": "Digits, two labels per client"}
COSINE, CONSTANT = 0.99, 1.25  # inert: both cosines above the one, lengths within the other of each other
Line = dict[str, Any]


def load(path: Path) -> list[Line]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def stored(folder: Path = RESULTS) -> dict[str, list[Line]]:
    return {problem: load(folder / f"{problem.replace(' ', '-')}.jsonl") for problem in TITLES}


def of(lines: list[Line], kind: str, method: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind and line["method"] == method]


def number(value: float) -> str:
    return "-" if math.isinf(value) else f"{value:g}"


def rounds_to(runs: list[Line], target: float) -> str:
    """The median, and every seed; one that never gets there counts as the worst."""
    each = [first_at(run["accuracy"], target) for run in runs]
    return f"**{number(median(each))}** ({', '.join(map(number, each))})"


def megabytes_to(runs: list[Line], target: float) -> str:
    moved = median(bytes_to(run, first_at(run["accuracy"], target)) for run in runs)
    return "-" if math.isinf(moved) else f"{moved / 1e6:.1f}"


def bytes_to(run: Line, rounds: float) -> float:
    return math.inf if math.isinf(rounds) else sum(run["bytes"][: int(rounds)])


def setting(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


def results(lines: list[Line]) -> str:
    goals = [f"{100 * target:g} %" for target in TARGETS]
    head = ("method", *(f"rounds to {goal}" for goal in goals), *(f"MB to {goal}" for goal in goals), "MB per round")
    rows = []
    for method in METHODS:
        if runs := of(lines, "run", method.name):
            ends = [100 * end(run) for run in runs]
            counts = [rounds_to(runs, target) for target in TARGETS]
            moved = [megabytes_to(runs, target) for target in TARGETS]
            each = median(run["bytes"][-1] for run in runs) / 1e6
            said = (f"{each:.2f}", f"{mean(ends):.1f} ± {stdev(ends):.1f}", sum(run["diverged"] for run in runs))
            rows.append((method.name, *counts, *moved, *said, setting(runs[0]["setting"])))
    return table((*head, "final, %", "diverged", "chosen"), rows)


def inert(runs: list[Line]) -> bool:
    """The medians over the seeds: the median of both cosines, and the 10th and 90th percentile of |y| / |s|."""
    turned = min(seen(runs, name)[1] for name in ("cos_sy", "cos_step"))
    low, _, high = seen(runs, "length_sy")
    return turned >= COSINE and high <= CONSTANT * low


def seen(runs: list[Line], name: str) -> tuple[float, ...]:
    """The median over the seeds of the 10th, 50th and 90th percentile over the rounds."""
    return tuple(median(run["watched"][name][place] for run in runs) for place in range(3))


def between(runs: list[Line], name: str) -> str:
    low, middle, high = seen(runs, name)
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def curvature(lines: list[Line]) -> str:
    """What every method's record says about its pairs and steps."""
    rows = []
    for method in METHODS:
        runs = of(lines, "run", method.name)
        names = ("cos_sy", "length_sy", "cos_step", "length_step", "step_update", "step_last")
        if not runs or not runs[0]["watched"]:
            continue
        cells = [between(runs, name) if name in runs[0]["watched"] else "" for name in names]
        pairs = "" if "cos_sy" not in runs[0]["watched"] else "/".join(str(run["pairs"][0]) for run in runs)
        acts = "" if not pairs else "**inert**" if inert(runs) else "yes"
        rows.append((method.name, *cells[:2], pairs, acts, *cells[2:]))
    head = ("method", "cos(s, y)", "\\|y\\|/\\|s\\|", "accepted pairs", "curvature acts")
    return table((*head, "cos(step, -g)", "\\|step\\|/\\|g\\|", "times u", "times last step"), rows)


def grids(lines: list[Line]) -> str:
    goal = HELD_OUT[lines[0]["problem"]]
    rows = []
    for method in METHODS:
        trials = of(lines, "trial", method.name)
        if trials:
            best = chosen(trials)
            tried = [(setting(one["setting"]), trial(one, goal), one["setting"] == best) for one in trials]
            rows.append((method.name, "; ".join(f"**{a}: {b}**" if bold else f"{a}: {b}" for a, b, bold in tried)))
    return table(("method", f"setting: rounds to held-out {100 * goal:g} %, accuracy at the end, %"), rows)


def trial(line: Line, goal: float) -> str:
    last = "diverged" if line["diverged"] else f"{100 * end(line):.1f}"
    return f"{number(first_at(line['accuracy'], goal))}, {last}"


def to95(lines: list[Line], method: str) -> str:
    """Median rounds and MB to the last target."""
    runs, target = of(lines, "run", method), TARGETS[-1]
    if not runs:
        return "not run"
    if math.isinf(median(first_at(run["accuracy"], target) for run in runs)):
        return "never"
    return f"{number(median(first_at(run['accuracy'], target) for run in runs))} ({megabytes_to(runs, target)} MB)"


def answer(found: dict[str, list[Line]]) -> str:
    """Rounds and MB to 95 %, both problems, in sentences."""

    def both_of(name: str) -> str:
        return " and ".join(to95(lines, name) for lines in found.values())

    still = [TITLES[problem] for problem, lines in found.items() if (runs := of(lines, "run", PRINTED)) and inert(runs)]
    lines = (
        f"**Rounds to test 95 %**, with all labels and with two labels per client: FedAvg {both_of('FedAvg')}; with a "
        f"longer server step {both_of('FedAvg, server step')}; with server momentum "
        f"{both_of('FedAvg, server momentum')}; with a spectral server step {both_of('Spectral server step')}, around "
        f"SCAFFOLD {both_of('SCAFFOLD, spectral server step')}; spectral local steps, carried, "
        f"{both_of('Spectral carried')}; FOOF {both_of('FOOF')}; GIANT {both_of('GIANT')}; "
        f"Subspace Newton {both_of('Subspace Newton')}; DONE {both_of('DONE')}; "
        f"Fisher L-BFGS as printed {both_of(PRINTED)}, with Gauss-Newton products {both_of('Fisher L-BFGS, product')}.",
        f"**Inert**: Fisher L-BFGS as printed ({'; '.join(still) or 'nowhere'}).",
    )
    return "\n".join(fill(f"- {line}", 120, subsequent_indent="  ") for line in lines)


def modes() -> str:
    return table(("method", "what it is"), [(method.name, method.mode) for method in METHODS])


def both(found: dict[str, list[Line]], say: Any) -> str:
    return "\n\n".join(f"### {TITLES[problem]}\n\n{say(lines)}" for problem, lines in found.items() if lines)


def made_with(found: dict[str, list[Line]]) -> str:
    config = next(lines[0] for lines in found.values() if lines)
    return "Made with " + ", ".join(f"{name} {value}" for name, value in config["versions"].items()) + "."


def filled(text: str, found: dict[str, list[Line]] | None = None) -> str:
    """The page with every block as the stored results have it."""
    found = stored() if found is None else found
    blocks = {
        "answer": answer(found),
        "methods": modes(),
        "results": both(found, results),
        "curvature": both(found, curvature),
        "grids": both(found, grids),
        "versions": made_with(found),
    }
    for name, said in blocks.items():
        begin, stop = f"<!-- {name}: generated -->\n", "<!-- end -->"
        if text.count(begin) != 1:
            raise ValueError(f"{PAGE.name} has {text.count(begin)} blocks '{name}', it needs one")
        before, after = text.split(begin)
        text = before + begin + said + "\n" + after[after.index(stop) :]
    return text


def write() -> None:
    PAGE.write_text(filled(PAGE.read_text("utf-8")), "utf-8")
