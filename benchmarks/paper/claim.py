"""One judged claim: what is said of it, whether it holds, and what the sentence adds about its seeds."""

from __future__ import annotations

from statistics import stdev
from typing import NamedTuple

from .tables import Cell

WITHIN, OVERLAP = ", within two deviations of the seeds", ", the seeds overlap"
FAR = 2.0  # points of deviation, from which on every seed is named


class Claim(NamedTuple):
    """What is said of a claim, and whether it holds; None if runs diverged. The rest is its place in a table."""

    said: str
    holds: bool | None
    about: str = ""  # the claim without its cell
    theirs: str = ""
    ours: str = ""

    @property
    def is_near(self) -> bool:
        """Whether the seeds differ as much as what is compared."""
        return WITHIN in self.said or OVERLAP in self.said

    def __str__(self) -> str:
        return self.said


def judged(said: str, holds: bool, *cells: Cell, about: str = "", theirs: str = "", ours: str = "") -> Claim:
    """The sentence with its verdict and with what it rests on."""
    there, all_ = min(len(cell.lines) for cell in cells), len(cells[0].entries)
    less = [f"{there} of {all_} seeds"] if there < all_ else []
    less += dict.fromkeys(cell.entry.cut for cell in cells if cell.entry.cut)
    so_far = f" (so far, {', '.join(less)})" if less else ""
    lost = sum(len(cell.lines) - len(cell.good) for cell in cells)
    verdict = f"undetermined: {lost} runs diverged" if lost else "holds" if holds else "does not hold"
    return Claim(f"{said}, {verdict}{so_far}", None if lost else holds, about, theirs, ours)


def within(difference: float, *cells: Cell) -> str:
    """Says so if a difference, in points, is no larger than two standard deviations of the seeds."""
    wide = [100 * stdev(values) for cell in cells if len(values := cell.values("final_accuracy")) > 1]
    return WITHIN if wide and abs(difference) <= 2 * max(wide) else ""


def seeds(cell: Cell) -> str:
    """Every seed's number, where they are far apart."""
    finals = [100 * value for value in cell.values("final_accuracy")]
    far = len(finals) > 1 and stdev(finals) > FAR
    return f" (seeds {', '.join(f'{final:.1f}' for final in finals)})" if far else ""


def rising(*cells: Cell) -> str:
    """Says whose curves have not come to their end."""
    found = ", ".join(cell.entry.label.removeprefix("FedOVA, ") for cell in cells if cell.rises())
    return f", still rising: {found}" if found else ""
