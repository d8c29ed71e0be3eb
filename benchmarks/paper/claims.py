"""The paper's claims, cell by cell: what it says, what we measured, and whether it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from fedge.sweep.entries import Entry, innermost
from fedge.sweep.store import Store

from .claim import OVERLAP, Claim, judged, rising, seeds, within
from .places import paper, stated
from .tables import Cell, cells

OURS, BASE, SECOND_ORDER, CLIPPED = "FedOVA", "FedAvg", "Fisher L-BFGS", "Clipped "
SAME = 1.0  # points within which two accuracies are the same


def claims(entries: Sequence[Entry], store: Store) -> list[Claim]:
    """One line per claim that there are runs for; how many seeds it rests on is said where some are missing."""
    found = cells(entries, store)
    by_cell: dict[str, dict[str, Cell]] = {}
    for label, row in found.items():
        for name, cell in row.items():
            by_cell.setdefault(name, {})[label] = cell
    kind = entries[0].experiment
    lines = list[Claim]()
    if kind in ("noniid", "sharing", "clients", "splits"):
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
            yield Claim(f"{name}: {OURS} {one}, undetermined: {row[OURS].text()}", None, f"{OURS} {_plain(one)}")
        return
    if wanted is not None:
        near = seeds(row[OURS]) + within(ours - wanted, row[OURS]) + rising(row[OURS])
        said = f"{name}: {OURS} at least the paper's {wanted:.1f} %: {ours:.1f} %{near}"
        about = f"{OURS} {_plain(said)}"
        yield judged(said, ours >= wanted, row[OURS], about=about, theirs=f"{wanted:.1f}", ours=f"{ours:.1f}")
    for label, other in row.items():
        word = _word(label)
        if label != OURS and not other.lines and other.superseded:
            said = f"{name}: {OURS} {word} our {label}, undetermined: {other.text()}"
            yield Claim(said, None, f"{OURS} {_plain(said)}")
        if label != OURS and other.final is not None:
            more = ours > other.final if label == "FedAvg" else ours >= other.final
            near = within(ours - other.final, row[OURS], other) + rising(row[OURS], other)
            said = f"{name}: {OURS} {word} our {label}: {ours:.2f} and {other.final:.2f} %{near}"
            gap = None if row[OURS].paper is None or other.paper is None else row[OURS].paper - other.paper
            theirs = "" if gap is None else f"{gap:+.1f}"
            about, own = f"{OURS} {_plain(said)}", f"{ours - other.final:+.1f}"
            yield judged(said, more, row[OURS], other, about=about, theirs=theirs, ours=own)


def _was_run(cell: Cell) -> bool:
    """With its own setting, or with the one before."""
    return bool(cell.lines or cell.superseded)


def _word(label: str) -> str:
    return "above" if label == "FedAvg" else "at least"


def _plain(said: str) -> str:
    """The kind of a comparison, whatever its cell and its numbers."""
    kinds = {"paper's": "at least as accurate as stated", "our FedAvg": "above FedAvg, points"}
    found = next(
        (kind for word, kind in kinds.items() if word in said),
        "at least as good as sharing 5 and 10 % of the data, points",
    )
    return found


def _better(name: str, row: dict[str, Cell]) -> Iterator[Claim]:
    """Clipping against none, method by method."""
    for label, cell in row.items():
        plain = row.get(label.removeprefix(CLIPPED))
        if plain is not None and plain is not cell and plain.final is not None and cell.final is not None:
            near = within(cell.final - plain.final, cell, plain) + rising(cell, plain)
            said = f"{name}: {label} above {plain.entry.label}: {cell.final:.2f} and {plain.final:.2f} %{near}"
            yield judged(said, cell.final > plain.final, cell, plain)


def _loss(row: Sequence[Cell]) -> Iterator[Claim]:
    """From few clients to many."""
    if len(row) < 2:
        return
    few, *_, many = row
    if few.final is None or few.paper is None or many.paper is None:
        return
    allowed = few.paper - many.paper
    said = f"{many.entry.cell}: {OURS} loses at most the paper's {allowed:.1f} points against {few.entry.cell}"
    about = f"{OURS} loses little with many clients, points"
    if many.final is not None:
        lost = few.final - many.final
        near = seeds(many) + within(lost - allowed, few, many) + rising(many)
        numbers = {"about": about, "theirs": f"{allowed:.1f}", "ours": f"{lost:.1f}"}
        yield judged(f"{said}: it loses {lost:.1f}{near}", lost <= allowed + 1e-9, few, many, **numbers)
    elif many.superseded:
        yield Claim(f"{said}, undetermined: {many.text()}", None, about)


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
    near = within(gains[0] - gains[1], *ends) + rising(*ends)
    said = (
        f"{cell}: fewer labels cost {OURS} less than {BASE}: up to {ours[-1].entry.cell}, {OURS} gains {gains[0]:.1f} "
    )
    theirs = [one.paper or 0.0 for one in ends]
    numbers = {
        "about": f"fewer labels cost {OURS} less than {BASE}, points",
        "theirs": f"{theirs[1] - theirs[0]:.1f} and {theirs[3] - theirs[2]:.1f}",
        "ours": f"{gains[0]:.1f} and {gains[1]:.1f}",
    }
    yield judged(f"{said}and {BASE} {gains[1]:.1f} points{near}", gains[0] < gains[1], *ends, **numbers)


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
        about = f"{SECOND_ORDER} needs fewer rounds than {base.entry.label}"
        theirs = " and ".join(str(stated("optimisers", one.entry.cell, one.entry.label)[1]) for one in (ours, base))
        own = f"{_rounds(pair, ' and ', '')} ({part} {target:g} %)"
        if min(map(median, pair)) == float("inf"):
            yield Claim(f"{said}, undetermined", None, about, theirs, own)
        else:
            numbers = {"about": about, "theirs": theirs, "ours": own}
            yield judged(said, median(pair[0]) < median(pair[1]), ours, base, **numbers)


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
    axis = name.split("-")[-1].replace("batch", "batch size")
    about = f"{OURS} ends at the same accuracy, whatever the {axis}"
    yield judged(f"{claim}{rising(*order)}", apart <= SAME, *order, about=about, theirs="figure", ours=said)
    firsts = [cell.first_rounds("test_accuracy", goal) for cell in order]
    middles = [median(one) for one in firsts]
    later = all(a <= b for a, b in pairwise(middles)) and middles[0] < middles[-1]
    said = f"{name}: fewer local steps, slower convergence: {goal:g} % after rounds {_rounds(firsts, ', ')}"
    about = f"{OURS} converges later with fewer local steps: {axis}"
    own = f"{goal:g} % after rounds {_rounds(firsts, ', ', '')}"
    yield judged(said, later, *order, about=about, theirs="figure", ours=own)


def _rounds(firsts: Sequence[Sequence[float]], between: str, after: str = " (medians of the seeds)") -> str:
    middles = [median(one) for one in firsts]
    return between.join(f"{one:g}" if one < float("inf") else "never" for one in middles) + after


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return max(one) >= min(other) and max(other) >= min(one)


def work(entry: Entry) -> float:
    """Local steps on an example of the data, up to a factor."""
    inner = innermost(entry.config["algorithm"])
    size = inner["batch_size"] if isinstance(inner["batch_size"], int) else 1e9  # all: one step an epoch
    return float(inner["epochs"] / size)
