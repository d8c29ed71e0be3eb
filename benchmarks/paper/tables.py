"""The paper's tables with our numbers beside each cell, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

from fedge.sweep.entries import Entry, step_of
from fedge.sweep.store import Line, Store, collapsed

from .places import paper, stated
from .strict import JUDGED, fell

NOT_RUN = "not run"
NOTHING = "–"
LAST, RISING = 20, 0.005  # rounds, and what a curve that has come to its end does not gain in them
FIGURES = ("curves", "batch-epochs")  # the paper states no numbers for these


class Cell:
    """The runs of one method in one cell, over the seeds."""

    def __init__(self, entries: Sequence[Entry], store: Store) -> None:
        self.entry, self.entries = entries[0], entries
        self.lines: list[Line] = [line for entry in entries if (line := store.find(entry.key)) is not None]
        self.good = [line for line in self.lines if is_good(line)]
        self.superseded = [line for entry in entries if (line := store.find(entry.instead_of)) is not None]

    @property
    def paper(self) -> float | None:
        return stated(self.entry.experiment, self.entry.cell, self.entry.label)[0]

    def values(self, name: str) -> list[float]:
        return [line[name] for line in self.good if line.get(name) is not None]

    @property
    def final(self) -> float | None:
        """The mean over the seeds, in %."""
        values = self.values("final_accuracy")
        return 100 * mean(values) if values else None

    def text(self, name: str = "final_accuracy", scale: float = 100, places: int = 1) -> str:
        """Mean and standard deviation; how many seeds there are if some are missing, how many diverged."""
        if not self.lines:
            return self._before(name, scale, places)
        values = [scale * value for value in self.values(name)]
        some = f" ({len(self.lines)} of {len(self.entries)} seeds)" if len(self.lines) < len(self.entries) else ""
        lost = len(self.lines) - len(self.good)
        failed = f" ({lost} of {len(self.lines)} diverged)" if lost else ""
        return (spread(values, places) if values else NOTHING) + some + failed

    def _before(self, name: str, scale: float, places: int) -> str:
        """What there is while the chosen setting was not run: the results of the superseded one."""
        if not self.superseded:
            return NOT_RUN
        values = [scale * line[name] for line in self.earlier if line.get(name) is not None]
        return f"{spread(values, places) if values else NOTHING}, {self.why_not}"

    @property
    def earlier(self) -> list[Line]:
        """Good runs with the superseded setting."""
        return [line for line in self.superseded if is_good(line)]

    @property
    def why_not(self) -> str:
        """Why what there is does not count."""
        lost = len(self.superseded) - len(self.earlier)
        step = step_of(self.superseded[0]["config"]["algorithm"])
        if self.entry.rank or lost:
            return f"but {lost} of {len(self.superseded)} seeds diverged with {step} (next best setting {NOT_RUN})"
        own = step_of(self.entry.config["algorithm"])
        return f"but with {step}, chosen for the whole data set ({own}, chosen for this cell, {NOT_RUN})"

    def first_rounds(self, name: str, target: float) -> list[float]:
        """The first round at the target (in %), seed by seed; infinite if it never is."""
        firsts = [first(line[name], target / 100) for line in self.good]
        return [float("inf") if one is None else one for one in firsts]

    def rises(self) -> bool:
        """Whether the mean of the last rounds is still more than half a point above that of as many before."""
        curves = [[value for value in line["test_accuracy"] if value is not None] for line in self.good]
        ends = [(mean(one[-2 * LAST : -LAST]), mean(one[-LAST:])) for one in curves if len(one) >= 2 * LAST]
        return bool(ends) and mean(late - early for early, late in ends) > RISING

    def reached(self, name: str, target: float) -> str:
        """The first round at which a series is at the target (in %)."""
        if not self.lines and not self.superseded:
            return NOT_RUN
        shown = self.good if self.lines else self.earlier
        firsts = [first(line[name], target / 100) for line in shown]
        there = [float(one) for one in firsts if one is not None]
        if not there:
            return "not reached"
        return spread(there, 0) + ("" if len(there) == len(firsts) else f" ({len(there)} of {len(firsts)} seeds)")


def is_good(line: Line) -> bool:
    """Whether a run counts: by the rule that its experiment was begun with."""
    if line.get("experiment") in JUDGED:
        return not fell(line)
    return not line["failed"] and not collapsed(line)


def first(series: Sequence[float | None], target: float) -> int | None:
    return next((at for at, value in enumerate(series, 1) if value is not None and value >= target), None)


def spread(values: Sequence[float], places: int) -> str:
    """Mean and standard deviation over the seeds.

    >>> spread([1.0, 3.0], 1)
    '2.0 ± 1.4'
    """
    if len(values) < 2:
        return f"{values[0]:.{places}f}"
    return f"{mean(values):.{places}f} ± {stdev(values):.{places}f}"


def cells(entries: Sequence[Entry], store: Store) -> dict[str, dict[str, Cell]]:
    """Label -> cell name -> its runs, both in the order of the files."""
    grouped: dict[str, dict[str, list[Entry]]] = {}
    for entry in entries:
        grouped.setdefault(entry.label, {}).setdefault(entry.cell, []).append(entry)
    return {label: {name: Cell(group, store) for name, group in row.items()} for label, row in grouped.items()}


def table(entries: Sequence[Entry], store: Store) -> str:
    """The paper's table: methods down, cells across; Table II has its own columns."""
    found = cells(entries, store)
    if entries[0].experiment == "optimisers":
        return _optimisers(found, entries[0].dataset)
    if entries[0].experiment in FIGURES:
        return _figure(found, entries[0].dataset)
    names = list(dict.fromkeys(entry.cell for entry in entries))
    known = any(cell.paper is not None for row in found.values() for cell in row.values())
    shown = slice(0 if known else 1, 2)  # of the paper's side and ours
    heads = [f"{title(name)}: {side}" for name in names for side in ("paper", "ours")[shown]]
    rows = []
    for label, row in found.items():
        sides = [(_stated(row[name].paper), row[name].text()) if name in row else (NOTHING, NOTHING) for name in names]
        rows.append([label, *(side for pair in sides for side in pair[shown])])
    return markdown(["test accuracy, %", *heads], rows)


def title(cell: str) -> str:
    """`fmnist-l2` is `l = 2`, `fmnist-k100` is `K = 100`; another word stays."""
    dataset, _, rest = cell.partition("-")
    if rest[:1] in ("l", "k") and rest[1:].isdigit():
        return f"{'K' if rest[0] == 'k' else rest[0]} = {rest[1:]}"
    return rest or str(paper()["datasets"].get(dataset, dataset))


def _stated(value: float | None, places: int = 1) -> str:
    return NOTHING if value is None else f"{value:.{places}f}"


def _figure(found: dict[str, dict[str, Cell]], dataset: str) -> str:
    """Where a curve ends and how soon it gets there."""
    goal = paper()["goals"][dataset]
    rows = [
        [name, label, cell.text(), cell.reached("test_accuracy", goal)]
        for label, row in found.items()
        for name, cell in row.items()
    ]
    return markdown(["panel", "method", "ours: final test, %", f"ours: rounds to {goal:g} %"], rows)


def _optimisers(found: dict[str, dict[str, Cell]], dataset: str) -> str:
    target = paper()["targets"][dataset]
    head = ["method", "paper: accuracy, %", "paper: rounds", "ours: test, %", "ours: train, %"]
    head += [f"ours: rounds to test {target['test']:g} %", f"ours: rounds to train {target['train']:g} %"]
    rows = []
    for label, row in found.items():
        (cell,) = row.values()
        accuracy, rounds = stated(cell.entry.experiment, cell.entry.cell, label)
        ours = [cell.text(), cell.text("final_train_accuracy")]
        ours += [cell.reached(f"{part}_accuracy", target[part]) for part in ("test", "train")]
        rows.append([label, _stated(accuracy), _stated(rounds, 0), *ours])
    return markdown(head, rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
