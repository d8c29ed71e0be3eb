"""The answer for the README: ranges and counts; docs/results.md has every number (`answer`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from textwrap import fill

from fedge.sweep import Store

from .answer import BETTER, Pair, in_short, pairs, worse
from .claim import within
from .claims import claims
from .places import paper
from .runs import Runs
from .tables import title


def text(runs: Runs, store: Store) -> str:
    """The same claims as the page's, one or two lines each."""
    found = pairs(runs, store)
    if not found:
        return "- Nothing was run yet."
    lines = [in_short(found), " ".join([BETTER, *worse(runs, store)]), _same_rounds(found), _same_bytes(found), COST]
    lines += [*_many(runs, store), *_optimiser(runs, store)]
    return "\n".join(fill(f"- {line}", 120, subsequent_indent="  ") for line in lines)


COST = "**A round costs l times FedAvg's**, in bytes and in local work, if clients hold l labels each."


def _same_rounds(found: dict[str, list[Pair]]) -> str:
    said = []
    for data, row in found.items():
        near = sum(bool(within(pair.ahead, pair.ours.cell, pair.base.cell)) for pair in row)
        little = f" ({near} of {len(row)} within the spread of the seeds)" if near else ""
        said.append(f"{_range([pair.ahead for pair in row])} on {data}{little}")
    return f"**After the same rounds** FedOVA is ahead of a tuned FedAvg by these points: {', '.join(said)}."


def _same_bytes(found: dict[str, list[Pair]]) -> str:
    leads = [pair.ahead_at_bytes for row in found.values() for pair in row]
    above, below = [lead for lead in leads if lead > 0], [-lead for lead in leads if lead < 0]
    said = [
        f"{word} in {len(some)} of {len(leads)} cells, by {_range(some)} points"
        for word, some in (("ahead", above), ("behind", below))
        if some
    ]
    return f"**At the bytes that FedAvg spends** FedOVA, stopped earlier, is {' and '.join(said)}."


def _many(runs: Runs, store: Store) -> list[str]:
    said, near = [], []
    for group in runs["clients"]:
        data = paper()["datasets"][group[0].dataset]
        for claim in claims(group, store):
            if claim.about.startswith("FedOVA loses") and claim.ours:
                cell = title(claim.said.split(": ", 1)[0])
                said.append(f"{claim.ours} points on {data} ({cell}; the paper {claim.theirs})")
                near += [data] if claim.is_near else []
    spread = f"; the seeds spread by more than the difference on {' and '.join(near)}" if near else ""
    return [f"**With many more clients** FedOVA loses {', '.join(said)}{spread}."] if said else []


def _optimiser(runs: Runs, store: Store) -> list[str]:
    every = [claim for group in runs["optimisers"] for claim in claims(group, store)]
    found = [claim for claim in every if claim.about.endswith("than FedAvg-SGD") and claim.ours]
    counts = Counter(claim.holds for claim in found)
    open_ = f" ({counts[None]} undetermined)" if counts[None] else ""
    line = "**The paper's L-BFGS method** takes fewer rounds than FedAvg with SGD to"
    return [f"{line} {counts[True]} of {len(found)} targets{open_}; the paper says to all of them."] if found else []


def _range(values: Sequence[float]) -> str:
    """`0.2 to 0.4`, or one number."""
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"
