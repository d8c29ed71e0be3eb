"""What `fedge reproduce` needs to know of the paper."""

from __future__ import annotations

from collections.abc import Sequence

from fedge.sweep import Entry, Store, Study
from fedge.sweep.halving import TRIALS

from .claims import claims
from .figures import draw
from .measured import details
from .places import BACKBONES, files, paper, root
from .tables import table


def study() -> Study:
    return Study(files(), root() / "results" / TRIALS, page, details, draw, BACKBONES)


def page(entries: Sequence[Entry], store: Store) -> str:
    """The title, the table and the claims."""
    first = entries[0]
    cut = "".join(dict.fromkeys(f", {entry.cut}" for entry in entries if entry.cut))
    title = f"{paper()['titles'][first.experiment]}, {paper()['datasets'][first.dataset]}{cut}"
    said = "\n".join(f"- {line}" for line in claims(entries, store))
    return "\n\n".join([f"# {title}", table(entries, store), said])
