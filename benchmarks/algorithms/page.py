"""docs/algorithms.md, made from results.jsonl and from the docstrings of the algorithms."""

from __future__ import annotations

import dataclasses
import inspect
import json
import textwrap
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import fedge
from benchmarks.theory.page import table

from .methods import METHODS

RESULTS = Path(__file__).parent / "results.jsonl"
PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
Line = dict[str, Any]


def save(lines: list[Line]) -> None:
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))


def load() -> list[Line]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def of(lines: list[Line], kind: str, method: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind and line["method"] == method]


def spread(values: list[float], places: int) -> str:
    """Mean and standard deviation over the seeds."""
    return f"{mean(values):.{places}f} ± {stdev(values):.{places}f}" if len(values) > 1 else f"{values[0]:.{places}f}"


def reached(runs: list[Line], name: str, places: int, scale: float = 1.0) -> str:
    """Over the seeds that reached the target, and how many did if not all."""
    values = [run[name] / scale for run in runs if run[name] is not None]
    if not values:
        return "not reached"
    return spread(values, places) + ("" if len(values) == len(runs) else f" ({len(values)} of {len(runs)} seeds)")


def setting(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def results(lines: list[Line]) -> str:
    rows = []
    for method in METHODS:
        runs = of(lines, "run", method.name)
        rows.append(
            (
                method.name,
                spread([100 * run["final"] for run in runs], 1),
                reached(runs, "rounds_to_target", 1),
                f"{mean(run['bytes_a_round'] for run in runs) / 1e6:.3f}",
                reached(runs, "bytes_to_target", 2, 1e6),
                setting(runs[0]["setting"]),
            )
        )
    return table(("method", "final accuracy, %", "rounds to 85 %", "MB per round", "MB to 85 %", "chosen"), rows)


def against(lines: list[Line]) -> str:
    """Every method's rounds and bytes to the target as a multiple of FedAvg's, where all seeds got there."""

    def average(method: str, name: str) -> float | None:
        values = [run[name] for run in of(lines, "run", method)]
        return None if None in values else mean(values)

    base = {name: average("FedAvg", name) for name in ("rounds_to_target", "bytes_to_target")}
    said = []
    for method in METHODS[1:]:
        found = [average(method.name, name) for name in base]
        if None not in found and None not in base.values():
            rounds, moved = (a / b for a, b in zip(found, base.values(), strict=True))  # type: ignore[operator]
            said.append(f"{method.name} {rounds:.2f} and {moved:.2f}")
    return textwrap.fill("Rounds and MB to 85 % as multiples of FedAvg's: " + "; ".join(said) + ".", 120)


def grids(lines: list[Line]) -> str:
    rows = []
    for method in METHODS:
        best = of(lines, "run", method.name)[0]["setting"]
        tried = [
            f"{'**' if trial['setting'] == best else ''}{setting(trial['setting'])}: "
            f"{100 * trial['validation']:.1f}{'**' if trial['setting'] == best else ''}"
            for trial in of(lines, "trial", method.name)
        ]
        rows.append((method.name, "; ".join(tried)))
    return table(("method", "setting: validation accuracy, %"), rows)


def modes(lines: list[Line]) -> str:
    rows = []
    for method in METHODS:
        run = of(lines, "run", method.name)[0]
        rows.append((method.name, method.mode, " → ".join(run["phases"]), f"{run['setup_bytes'] / 1e6:.3f}"))
    return table(("method", "mode", "phases of a round", "set-up, MB"), rows)


MEASURED = {
    "Spectral": "second-order.md",
    "SubspaceNewton": "curvature.md",
    "GIANT": "curvature.md",
    "DONE": "curvature.md",
    "Robust": "attacks.md",
    "Compressed": "uploads.md",
    "Private": "privacy.md",
    "FedBuff": "edge.md#nobody-is-waited-for",
    "FedAsync": "edge.md#nobody-is-waited-for",
}


def description(kind: type) -> str:
    """The docstring, with formulas as such, and the fields with their defaults."""
    paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    shown = [
        f"```\n{textwrap.dedent(part)}\n```" if part.startswith(" ") else " ".join(part.split()) for part in paragraphs
    ]
    place = MEASURED.get(kind.__name__)
    more = "" if place is None else f" Measured in [{place.partition('.')[0].replace('-', ' ')}]({place})."
    return "\n\n".join([f"### `{kind.__name__}`", *shown, f"Fields: {fields(kind)}.{more}"])


def fields(kind: type) -> str:
    """Those that a file or a call may set, but for model, loss and inner algorithm."""
    found = {field.name: field for field in dataclasses.fields(kind) if field.name not in ("model", "loss", "inner")}
    said = {
        name: "" if field.default is dataclasses.MISSING else f" = {field.default!r}" for name, field in found.items()
    }
    return ", ".join(f"`{name}{value}`" for name, value in said.items())


def shared(beta: float, examples: int, clients: int) -> int:
    return max(1, round(beta * examples / clients))


TEXT = """\
# The algorithms on digits

Generated by `python -m benchmarks.algorithms` (the runs, and this page from `benchmarks/algorithms/results.jsonl`;
`--page` for the page alone). Do not edit.

Digits (1,437 training and 360 test images), {labels} labels per client (non-IID-{labels}), {clients} clients, {cohort}
per round, {rounds} rounds, network 64-32-10 (64-32-2 per class under FedOVA). Mean and standard deviation over {seeds}
seeds; a seed changes the partition, the network's first weights and the training. *Final accuracy* is the mean of the
last {last} rounds on the test set. *Rounds to 85 %* is the first round with that test accuracy. MB are 10⁶ bytes of
payload, up and down; *MB to 85 %* include the set-up.

{results}

{against}

One test image is 0.28 %, and with three seeds a difference of less than about two standard deviations says little.
Clients hold {size} examples on average, so sharing 5 % and 10 % both round to {few} shared example and are the same
run. 20 % are {more} examples and 50 % are {most}. One shared example has one label: it says nothing about the other
nine.

## How the settings were chosen

Six settings per method, with the same budget for each. {validation} % of the training set, stratified, was held out.
Every setting was trained on the rest for {tuning_rounds} rounds with seed 0. The one with the best accuracy on the
held-out part (mean of the last {last} rounds) was taken for all seeds (bold). The test set had no say.

{grids}

## Modes and phases

{modes}

## What each does

From the docstrings. c is the size of the cohort, d the number of parameters, b the bytes of one parameter (4 here).

{descriptions}

## Made with

{versions}. Bytes and accuracies do not depend on the speed of the machine.
"""


def text(lines: list[Line]) -> str:
    config = lines[0]
    images, clients = 1437, config["clients"]
    optimisers = (fedge.SGD, fedge.Adam, fedge.Spectral, fedge.Shampoo, fedge.SOAP)
    first = (fedge.FedAvg, *optimisers, fedge.FedProx, fedge.FedNova, fedge.FedCM)
    trained = (
        *first,
        fedge.SCAFFOLD,
        fedge.FedPer,
        fedge.FedDANE,
        fedge.FisherLBFGS,
        fedge.FOOF,
        fedge.SubspaceNewton,
        fedge.GIANT,
        fedge.DONE,
    )
    kinds = (*trained, fedge.FedOVA, fedge.SharedOVA, fedge.DataSharing, fedge.Averaged, fedge.Calibrated)
    kinds = (*kinds, fedge.Robust, fedge.Compressed, fedge.Private, fedge.FedBuff, fedge.FedAsync)
    return TEXT.format(
        **{name: config[name] for name in ("labels", "clients", "cohort", "rounds", "last")},
        validation=round(100 * config["validation"]),
        tuning_rounds=config["tuning_rounds"],
        seeds=len(config["seeds"]),
        results=results(lines),
        against=against(lines),
        grids=grids(lines),
        modes=modes(lines),
        descriptions="\n\n".join(description(kind) for kind in kinds),
        versions=", ".join(f"{name} {value}" for name, value in config["versions"].items()),
        size=round(images / clients),
        few=shared(0.1, images, clients),
        more=shared(0.2, images, clients),
        most=shared(0.5, images, clients),
    )


def write() -> None:
    PAGE.write_text(text(load()))
