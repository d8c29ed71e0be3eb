"""One table and one figure per experiment, all data sets in one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fedge.sweep import Entry, Store

from .answer import goal_of
from .claims import OURS
from .costs import Costs, shown
from .places import paper, stated
from .runs import BASES, Runs, base_of, bases
from .tables import NOTHING, Cell, cells, markdown, title


def image(name: str) -> str:
    return f"images/paper-{name}.png"


def sections(runs: Runs, store: Store, names: Iterable[str]) -> str:
    """Of these experiments, as far as anything of them was run."""
    every = bases(runs, store)
    return "\n\n".join(section(name, runs[name], store, every) for name in names if _any(runs.get(name, []), store))


def _any(groups: Sequence[Sequence[Entry]], store: Store) -> bool:
    return any(store.find(entry.key) or store.find(entry.instead_of) for group in groups for entry in group)


def section(name: str, groups: Sequence[Sequence[Entry]], store: Store, every: dict[str, Cell]) -> str:
    heading = paper()["titles"][name]
    remark = [paper()["remarks"][name].strip()] if name in paper()["remarks"] else []
    picture = f"![{heading}]({image(name)})"
    return "\n\n".join([f"## {heading}", *remark, table(name, groups, store, every), picture])


def table(name: str, groups: Sequence[Sequence[Entry]], store: Store, every: dict[str, Cell]) -> str:
    """Methods and cells down; columns that are empty everywhere are left out."""
    rows = [row for group in groups for row in _rows(name, group, store, every)]
    heads = list(dict.fromkeys(head for row in rows for head in row))
    kept = [head for head in heads if any(row.get(head, NOTHING) != NOTHING for row in rows)]
    return markdown(kept, [[row.get(head, NOTHING) for head in kept] for row in rows])


def _rows(name: str, group: Sequence[Entry], store: Store, every: dict[str, Cell]) -> Iterator[dict[str, str]]:
    found = cells(group, store)
    for cell_name in dict.fromkeys(entry.cell for entry in group):
        row = {label: by_name[cell_name] for label, by_name in found.items() if cell_name in by_name}
        for label, cell in row.items():
            known = name == "clipped" and label in (*BASES, OURS)  # they stand in Table III
            if (cell.lines or cell.superseded) and not known:
                yield _row(name, label, cell, base_of(cell, row, every))


def _row(name: str, label: str, cell: Cell, base: Cell | None) -> dict[str, str]:
    entry, costs = cell.entry, Costs(cell, base)
    goal, data = goal_of(entry), paper()["datasets"][entry.dataset]
    accuracy, rounds = stated(entry.experiment, entry.cell, entry.label)
    part = title(entry.cell)
    return {
        "data": data if part == data else f"{data}, {part}",
        "method": label,
        "paper, %": NOTHING if accuracy is None else f"{accuracy:.1f}",
        "paper, rounds": NOTHING if rounds is None else str(rounds),
        "ours, %": cell.text(),
        "train, %": cell.text("final_train_accuracy") if name == "optimisers" else NOTHING,
        "at FedAvg's bytes, %": costs.equal_text(),
        "target": f"{goal:g} %",
        "rounds to it": cell.reached("test_accuracy", goal),
        "MB to it": shown(costs.bytes_to(goal)),
        "10⁶ gradients to it": shown(costs.gradients_to(goal), places=1),
    }
