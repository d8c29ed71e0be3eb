"""The paper's claims, cell by cell: what it says, what we measured, and whether it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedge.reproduce.jobs import Job
from fedge.reproduce.store import Store
from fedge.reproduce.tables import Cell, cells

OURS = "FedOVA"


def claims(jobs: Sequence[Job], store: Store) -> list[str]:
    """One line a claim of which all runs are there."""
    found = cells(jobs, store)
    by_cell: dict[str, dict[str, Cell]] = {}
    for label, row in found.items():
        for name, cell in row.items():
            by_cell.setdefault(name, {})[label] = cell
    kind = jobs[0].experiment
    lines = list[str]()
    if kind in ("noniid", "sharing", "clients"):
        for name, row in by_cell.items():
            lines += _in_a_cell(name, row)
    if kind == "clients":
        lines += _loss([row[OURS] for row in by_cell.values() if OURS in row])
    return lines


def _in_a_cell(name: str, row: dict[str, Cell]) -> Iterator[str]:
    ours = row[OURS].final if OURS in row else None
    if ours is None:
        return
    if (wanted := row[OURS].paper) is not None:
        yield _line(f"{name}: {OURS} at least the paper's {wanted:g} %", ours, ours >= wanted)
    for label, other in row.items():
        if label != OURS and other.final is not None:
            yield _line(f"{name}: {OURS} at least our {label}, {other.final:.1f} %", ours, ours >= other.final)


def _loss(row: Sequence[Cell]) -> Iterator[str]:
    """From few clients to many."""
    if len(row) < 2:
        return
    few, *_, many = row
    if few.final is None or many.final is None or few.paper is None or many.paper is None:
        return
    allowed, lost = few.paper - many.paper, few.final - many.final
    said = f"{many.job.cell}: {OURS} loses at most the paper's {allowed:.1f} points against {few.job.cell}"
    yield f"{said}: it loses {lost:.1f}, {'holds' if lost <= allowed + 1e-9 else 'does not hold'}"


def _line(claim: str, ours: float, holds: bool) -> str:
    return f"{claim}: {ours:.1f} %, {'holds' if holds else 'does not hold'}"
