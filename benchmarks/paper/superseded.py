"""docs/results-superseded.md: runs that gave way to others, and runs that fell."""

from __future__ import annotations

from fedge.sweep import Entry, Store
from fedge.sweep.entries import step_of

from . import measured
from .claims import claims
from .places import paper
from .runs import Runs
from .tuned import dips, falls

TEXT = """\
# Superseded runs, and runs that fell

{note} [The results](results.md) themselves are on their own page.

If a run of any seed diverges, its setting is replaced by the next best. A run has diverged if too few uploads of a
round are finite, or if it has 100 rounds or more and its last accuracy is below half of its best. (Some dropped uploads
alone are no divergence.) That is the one decision in which the test set has a say.

`splits` and `balanced-sharing` are judged by a stricter rule, which was fixed before they ran. There a run counts if no
round after the 50th is below nine tenths of the best before it, and if its last 20 rounds are within three points of
its best 20 in a row.

These runs diverged (without the trials of the tuning):

{falls}

These runs fell below nine tenths of their best after round 50, but recovered or did not fall below half of it. By the
first rule they have not diverged, and they count:

{dips}

## Runs with superseded settings

These settings were replaced because a seed diverged, or because tuning for the cell itself (on held-out data, for 120
rounds) chose another.

{others}
"""


def superseded(runs: Runs, store: Store, note: str) -> str:
    parts = []
    for name, groups in runs.items():
        for group in groups:
            if rest := measured.others(group, store):
                parts += [f"### {name}, {paper()['datasets'][group[0].dataset]}", rest, *_if_better(group, store)]
    return TEXT.format(note=note, falls=falls(store), dips=dips(store), others="\n\n".join(parts) or "Nothing so far.")


def _if_better(runs: list[Entry], store: Store) -> list[str]:
    """Which settings would have been better on the test set, and what would be said with them."""
    better = measured.better(runs, store)
    if better == runs:
        return []
    claimed = {claim.said for claim in claims(runs, store)}
    said = [claim.said for claim in claims(better, store) if claim.said not in claimed]
    found = dict.fromkeys(
        f"{new.cell}, {new.label}, {step_of(new.config['algorithm'])}"
        for old, new in zip(runs, better, strict=True)
        if new.key != old.key
    )
    intro = f"These turned out better on the test set than what was chosen: {'; '.join(found)}. With them:"
    return [intro, "\n".join(f"- {line}" for line in said)]
