"""One row per claim of the paper: the claim, its number, ours, the verdict, and where it is shown."""

from __future__ import annotations

from collections.abc import Sequence

from fedge.sweep import Entry, Store

from .claim import Claim
from .claims import claims
from .places import paper
from .tables import markdown, title

Grouped = dict[tuple[str, str, str], dict[str, Claim]]  # (claim, data set, experiment) -> cell and sentence -> claim


def table(every: Sequence[Sequence[Entry]], store: Store) -> str:
    rows = [
        row(about, data, name, list(found.values())) for (about, data, name), found in grouped(every, store).items()
    ]
    return markdown(["claim", "data", "paper", "ours", "verdict", "where"], rows)


def grouped(every: Sequence[Sequence[Entry]], store: Store) -> Grouped:
    """The claims of all tables; one that two tables make is in the first."""
    found: Grouped = {}
    seen: set[tuple[str, str]] = set()
    for group in every:
        dataset, name = group[0].dataset, group[0].experiment
        own = {claim: (_cell(claim.said.split(": ", 1)[0], dataset), claim.about) for claim in claims(group, store)}
        for claim in (claim for claim, same in own.items() if same not in seen):
            found.setdefault((claim.about, dataset, name), {})[claim.said] = claim
        seen |= {*own.values()}
    return dict(sorted(found.items(), key=lambda item: (_order(every, item[0][2]), _first(found, item[0][0]))))


def _cell(name: str, dataset: str) -> str:
    """Two labels per client and 100 clients have three names."""
    return f"{dataset}-l2" if name in (dataset, f"{dataset}-k100") else name


def _order(every: Sequence[Sequence[Entry]], name: str) -> int:
    return [group[0].experiment for group in every].index(name)


def _first(found: Grouped, about: str) -> int:
    """A claim's rows stand together, whatever their data set."""
    return [one for one, _, _ in found].index(about)


def row(about: str, dataset: str, name: str, found: Sequence[Claim]) -> list[str]:
    theirs, ours = ([getattr(claim, side) for claim in found] for side in ("theirs", "ours"))
    theirs = theirs[:1] if name == "optimisers" else theirs  # stated once, whatever our target
    cells = dict.fromkeys(title(claim.said.split(": ", 1)[0]) for claim in found)
    which = f" ({_named(list(cells))})" if name in ("noniid", "clients") and "fewer" not in about else ""
    heading = paper()["titles"][name]
    sides = [" / ".join(theirs), " / ".join(ours)]
    return [about + which, paper()["datasets"][dataset], *sides, verdict(found), f"[{name}](#{anchor(heading)})"]


def _named(cells: Sequence[str]) -> str:
    """`l = 2, 3, 5`."""
    return ", ".join([*cells[:1], *(name.split(" = ")[-1] for name in cells[1:])])


def verdict(found: Sequence[Claim]) -> str:
    """Holds, does not, or how many do; and how many are within what seeds differ by.

    >>> verdict([Claim("a", True), Claim("b, the seeds overlap", False)])
    '**1 of 2 hold** (1 within the spread of the seeds)'
    """
    holding, unknown = sum(claim.holds is True for claim in found), sum(claim.holds is None for claim in found)
    said = f"**{holding} of {len(found)} hold**"
    if holding in (0, len(found)):
        said = "**holds**" if holding else "**does not hold**"
    said = "undetermined" if unknown == len(found) else said + (f", {unknown} undetermined" if unknown else "")
    near = sum(claim.is_near for claim in found)
    little = "" if not near else "within" if near == len(found) else f"{near} within"
    return f"{said} ({little} the spread of the seeds)" if little else said


def anchor(heading: str) -> str:
    """The link of a heading, as GitHub and the site make it.

    >>> anchor("Table II: optimisers, IID")
    'table-ii-optimisers-iid'
    """
    kept = "".join(one for one in heading.lower() if one.isalnum() or one in " -")
    return kept.replace(" ", "-")
