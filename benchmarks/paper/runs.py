"""What was run and what was not: the experiments with their entries, the base of every cell, and the gaps."""

from __future__ import annotations

from collections.abc import Iterator

from fedge.sweep import Choices, Entry, Store

from .places import BEYOND, DATASETS, EXPERIMENTS, entries, paper
from .tables import Cell, cells, title

SEEDS = (0, 1, 2)
Runs = dict[str, list[list[Entry]]]  # experiment -> one list per data set
BASES = ("FedAvg", "FedAvg-SGD")


def shown(store: Store, choices: Choices) -> Runs:
    """All of the paper's experiments; of what goes beyond them, what has a result of its own."""
    runs = {name: list(wanted(name, store, choices)) for name in EXPERIMENTS}
    known = {entry.key for name in runs if name not in BEYOND for group in runs[name] for entry in group}
    for name in BEYOND:
        new = [[entry for entry in group if entry.key not in known] for group in runs[name]]
        runs[name] = [
            group for group, own in zip(runs[name], new, strict=True) if any(store.find(entry.key) for entry in own)
        ]
    return {name: groups for name, groups in runs.items() if groups}


def of_the_paper(runs: Runs) -> list[list[Entry]]:
    return [group for name, groups in runs.items() if name not in BEYOND for group in groups]


def wanted(name: str, store: Store, choices: Choices) -> Iterator[list[Entry]]:
    """The runs of an experiment, one list per data set that the paper has it for."""
    for dataset in DATASETS:
        if found := entries(name, dataset, SEEDS, ranked=choices, diverged=store.diverged):
            yield found


def bases(runs: Runs, store: Store) -> dict[str, Cell]:
    """The FedAvg of every cell, by its name; a cell without one has that of two labels per client."""
    found: dict[str, Cell] = {}
    for group in of_the_paper(runs):
        for label, row in cells(group, store).items():
            found |= row if label in BASES and group[0].experiment not in ("curves", "optimisers") else {}
    return found


def base_of(cell: Cell, row: dict[str, Cell], every: dict[str, Cell]) -> Cell | None:
    """Whose bytes a cell is compared at; `row`: all methods of the same cell, by label."""
    own = next((row[label] for label in BASES if label in row), None)
    return own or every.get(f"{cell.entry.dataset}-l2")


def state(every: list[list[Entry]], store: Store) -> str:
    """How many of the runs there are, by data set."""
    found = []
    for dataset in DATASETS:
        keys = {entry.key for group in every for entry in group if entry.dataset == dataset}
        done = sum(store.find(key) is not None for key in keys)
        found.append(f"{paper()['datasets'][dataset]} {done} of {len(keys)} runs")
    return ", ".join(found)


def gaps(runs: Runs, store: Store) -> str:
    """Cells in which nothing was run, in one line."""
    found = []
    for dataset in DATASETS:
        groups = [group for groups in runs.values() for group in groups if group[0].dataset == dataset]
        parts = {group[0].experiment: _missing(group, store) for group in groups}
        if groups and all(missing == "all" for missing in parts.values()):
            found.append(f"all of {paper()['datasets'][dataset]}")
            continue
        said = [name if what == "all" else f"{name} {what}" for name, what in parts.items() if what]
        found += [f"{paper()['datasets'][dataset]}: {', '.join(said)}"] if said else []
    return f"Not run: {'; '.join(found)}." if found else "Every cell was run."


def _missing(group: list[Entry], store: Store) -> str:
    """`all`, or which cells of which methods, or nothing."""
    rows = [(label, name, cell) for label, row in cells(group, store).items() for name, cell in row.items()]
    gone = [(label, name) for label, name, cell in rows if not cell.lines and not cell.superseded]
    if len(gone) == len(rows):
        return "all"
    by_label: dict[str, list[str]] = {}
    for label, name in gone:
        by_label.setdefault(label, []).append(title(name))
    return " and ".join(f"{label} ({', '.join(names)})" for label, names in by_label.items())
