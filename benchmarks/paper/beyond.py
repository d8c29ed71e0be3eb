"""docs/results-beyond.md: what the paper does not have, one table and one figure per experiment."""

from __future__ import annotations

from fedge.sweep import Store

from .places import BEYOND
from .runs import Runs
from .sections import sections

TEXT = """\
# Beyond the paper

{note} [The paper's own experiments](results.md) and how to read these tables are on their own page.

{sections}
"""


def beyond(runs: Runs, store: Store, note: str) -> str:
    return TEXT.format(note=note, sections=sections(runs, store, BEYOND))
