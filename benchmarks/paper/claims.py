"""The paper's claims, cell by cell: what it says, what we measured, and whether it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median, stdev
from typing import NamedTuple

from fedge.sweep.entries import Entry, innermost
from fedge.sweep.store import Store

from .places import paper, stated
from .tables import Cell, cells

OURS, BASE, SECOND_ORDER, CLIPPED = "FedOVA", "FedAvg", "Fisher L-BFGS", "Clipped "
WITHIN, OVERLAP = ", within two deviations of the seeds", ", the seeds overlap"
FAR = 2.0  # points of deviation, from which on every seed is named
SAME = 1.0  # points within which two accuracies are the same


class Claim(NamedTuple):
    """What is said of a claim, and whether it holds; None if runs diverged."""

    said: str
    holds: bool | None

    @property
    def is_near(self) -> bool:
        """Whether the seeds differ as much as what is compared."""
        return WITHIN in self.said or OVERLAP in self.said

    def __str__(self) -> str:
        return self.said


def claims(entries: Sequence[Entry], store: Store) -> list[Claim]:
    """One line per claim that there are runs for; how many seeds it rests on is said where some are missing."""
    found = cells(entries, store)
    by_cell: dict[str, dict[str, Cell]] = {}
    for label, row in found.items():
        for name, cell in row.items():
            by_cell.setdefault(name, {})[label] = cell
    kind = entries[0].experiment
    lines = list[Claim]()
    if kind in ("noniid", "sharing", "clients"):
        for name, row in by_cell.items():
            lines += _in_a_cell(name, row)
    if kind == "noniid":
        lines += _influence(found)
    if kind == "clipped":
        for name, row in by_cell.items():
            clipped = {label.removeprefix(CLIPPED): cell for label, cell in row.items() if label.startswith(CLIPPED)}
            lines += [*_in_a_cell(f"{name}, clipped", clipped, "noniid"), *_better(name, row)]
    if kind == "clients":
        lines += _loss([row[OURS] for row in by_cell.values() if OURS in row])
    if kind == "optimisers":
        for row in by_cell.values():
            lines += _fewer_rounds(row, entries[0].dataset)
    if kind == "batch-epochs":
        for name, row in by_cell.items():
            lines += _steps(name, row, entries[0].dataset)
    return lines


def _in_a_cell(name: str, row: dict[str, Cell], table: str | None = None) -> Iterator[Claim]:
    """FedOVA against the paper's number, of this table or another, and against what else is in the cell."""
    if OURS not in row:
        return
    ours, wanted = row[OURS].final, stated(table, row[OURS].entry.cell, OURS)[0] if table else row[OURS].paper
    if ours is None:
        against = [] if wanted is None else [f"at least the paper's {wanted:.1f} %"]
        against += [f"{_word(label)} our {label}" for label, one in row.items() if label != OURS and _was_run(one)]
        for one in against if row[OURS].superseded else []:
            yield Claim(f"{name}: {OURS} {one}, cannot be said: {row[OURS].text()}", None)
        return
    if wanted is not None:
        near = _seeds(row[OURS]) + _within(ours - wanted, row[OURS]) + _rising(row[OURS])
        said = f"{name}: {OURS} at least the paper's {wanted:.1f} %: {ours:.1f} %{near}"
        yield _line(said, ours >= wanted, row[OURS])
    for label, other in row.items():
        word = _word(label)
        if label != OURS and not other.lines and other.superseded:
            yield Claim(f"{name}: {OURS} {word} our {label}, cannot be said: {other.text()}", None)
        if label != OURS and other.final is not None:
            more = ours > other.final if label == "FedAvg" else ours >= other.final
            near = _within(ours - other.final, row[OURS], other) + _rising(row[OURS], other)
            said = f"{name}: {OURS} {word} our {label}: {ours:.2f} and {other.final:.2f} %{near}"
            yield _line(said, more, row[OURS], other)


def _was_run(cell: Cell) -> bool:
    """With its own setting, or with the one before."""
    return bool(cell.lines or cell.superseded)


def _word(label: str) -> str:
    return "above" if label == "FedAvg" else "at least"


def _better(name: str, row: dict[str, Cell]) -> Iterator[Claim]:
    """Clipping against none, method by method."""
    for label, cell in row.items():
        plain = row.get(label.removeprefix(CLIPPED))
        if plain is not None and plain is not cell and plain.final is not None and cell.final is not None:
            near = _within(cell.final - plain.final, cell, plain) + _rising(cell, plain)
            said = f"{name}: {label} above {plain.entry.label}: {cell.final:.2f} and {plain.final:.2f} %{near}"
            yield _line(said, cell.final > plain.final, cell, plain)


def _loss(row: Sequence[Cell]) -> Iterator[Claim]:
    """From few clients to many."""
    if len(row) < 2:
        return
    few, *_, many = row
    if few.final is None or few.paper is None or many.paper is None:
        return
    allowed = few.paper - many.paper
    said = f"{many.entry.cell}: {OURS} loses at most the paper's {allowed:.1f} points against {few.entry.cell}"
    if many.final is not None:
        lost = few.final - many.final
        near = _seeds(many) + _within(lost - allowed, few, many) + _rising(many)
        yield _line(f"{said}: it loses {lost:.1f}{near}", lost <= allowed + 1e-9, few, many)
    elif many.superseded:
        yield Claim(f"{said}, cannot be said: {many.text()}", None)


def _influence(found: dict[str, dict[str, Cell]]) -> Iterator[Claim]:
    """Table III: the number of labels matters to FedAvg and hardly to FedOVA (Sec. VI)."""
    if OURS not in found or BASE not in found:
        return
    ours, base = ([row[name] for name in found[OURS] if name in row] for row in (found[OURS], found[BASE]))
    if len(ours) < 2 or len(base) < 2:
        return
    ends = (ours[0], ours[-1], base[0], base[-1])
    few, many, few_base, many_base = (cell.final for cell in ends)
    if few is None or many is None or few_base is None or many_base is None:
        return
    gains, cell = (many - few, many_base - few_base), ours[0].entry.cell
    near = _within(gains[0] - gains[1], *ends) + _rising(*ends)
    said = (
        f"{cell}: fewer labels cost {OURS} less than {BASE}: up to {ours[-1].entry.cell}, {OURS} gains {gains[0]:.1f} "
    )
    yield _line(f"{said}and {BASE} {gains[1]:.1f} points{near}", gains[0] < gains[1], *ends)


def _fewer_rounds(row: dict[str, Cell], dataset: str) -> Iterator[Claim]:
    """Table II: the second-order method needs fewer rounds than each of the others, to the same accuracy."""
    ours = row.get(SECOND_ORDER)
    if ours is None or not ours.good:
        return
    for base in row.values():
        if base is not ours and base.good:
            yield from _fewer_than(ours, base, dataset)


def _fewer_than(ours: Cell, base: Cell, dataset: str) -> Iterator[Claim]:
    for part, target in paper()["targets"][dataset].items():
        pair = [one.first_rounds(f"{part}_accuracy", target) for one in (ours, base)]
        claim = f"{ours.entry.cell}: {SECOND_ORDER} reaches {part} {target:g} % in fewer rounds than {base.entry.label}"
        mixed = OVERLAP if _overlap(*pair) else ""
        said = f"{claim}: {_rounds(pair, ' and ')}{mixed}"
        if min(map(median, pair)) == float("inf"):
            yield Claim(f"{said}, cannot be said", None)
        else:
            yield _line(said, median(pair[0]) < median(pair[1]), ours, base)


def _steps(name: str, row: dict[str, Cell], dataset: str) -> Iterator[Claim]:
    """The figure's two observations: the same end whatever the batch size and the epochs, and later with less work."""
    order = sorted(row.values(), key=lambda cell: -work(cell.entry))
    if len(order) < 2 or any(cell.final is None for cell in order):
        return
    finals, goal = [cell.final or 0.0 for cell in order], paper()["goals"][dataset]
    said = ", ".join(
        f"{one.entry.label.split(', ')[-1]}: {final:.1f}" for one, final in zip(order, finals, strict=True)
    )
    apart = max(finals) - min(finals)
    claim = f"{name}: the same final accuracy, within {SAME:g} point and with one step size ({said})"
    yield _line(f"{claim}{_rising(*order)}", apart <= SAME, *order)
    firsts = [cell.first_rounds("test_accuracy", goal) for cell in order]
    middles = [median(one) for one in firsts]
    later = all(a <= b for a, b in pairwise(middles)) and middles[0] < middles[-1]
    said = f"{name}: fewer local steps, slower convergence: {goal:g} % after rounds {_rounds(firsts, ', ')}"
    yield _line(said, later, *order)


def _rounds(firsts: Sequence[Sequence[float]], between: str) -> str:
    middles = [median(one) for one in firsts]
    return between.join(f"{one:g}" if one < float("inf") else "never" for one in middles) + " (medians of the seeds)"


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return max(one) >= min(other) and max(other) >= min(one)


def work(entry: Entry) -> float:
    """Local steps on an example of the data, up to a factor."""
    inner = innermost(entry.config["algorithm"])
    size = inner["batch_size"] if isinstance(inner["batch_size"], int) else 1e9  # all: one step an epoch
    return float(inner["epochs"] / size)


def _within(difference: float, *cells: Cell) -> str:
    """Says so if a difference, in points, is no larger than two standard deviations of the seeds."""
    wide = [100 * stdev(values) for cell in cells if len(values := cell.values("final_accuracy")) > 1]
    return WITHIN if wide and abs(difference) <= 2 * max(wide) else ""


def _seeds(cell: Cell) -> str:
    """Every seed's number, where they are far apart."""
    finals = [100 * value for value in cell.values("final_accuracy")]
    far = len(finals) > 1 and stdev(finals) > FAR
    return f" (seeds {', '.join(f'{final:.1f}' for final in finals)})" if far else ""


def _rising(*cells: Cell) -> str:
    """Says whose curves have not come to their end."""
    found = ", ".join(cell.entry.label.removeprefix(f"{OURS}, ") for cell in cells if cell.rises())
    return f", still rising: {found}" if found else ""


def _line(claim: str, holds: bool, *cells: Cell) -> Claim:
    there, all_ = min(len(cell.lines) for cell in cells), len(cells[0].entries)
    less = [f"{there} of {all_} seeds"] if there < all_ else []
    less += dict.fromkeys(cell.entry.cut for cell in cells if cell.entry.cut)
    so_far = f" (so far, {', '.join(less)})" if less else ""
    lost = sum(len(cell.lines) - len(cell.good) for cell in cells)
    verdict = f"cannot be said: {lost} runs diverged" if lost else "holds" if holds else "does not hold"
    return Claim(f"{claim}, {verdict}{so_far}", None if lost else holds)
