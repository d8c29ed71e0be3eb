"""Does bf16 change the numbers? One cell of CIFAR-10 in both precisions, the rest equal."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import fill

from fedge.sweep import Store

from .places import paper
from .tables import title

OTHER = Path(__file__).parent / "results" / "cifar10-tf32.jsonl"


def parity(store: Store) -> str:
    """A sentence per run of which there is a twin in TF32."""
    said = []
    for other in map(json.loads, OTHER.read_text().splitlines()):
        twin = store.find(other["key"])
        if twin is None or twin["engine"] == other["engine"]:
            continue
        where = f"{paper()['datasets'][other['cell'].split('-')[0]]} at {title(other['cell'])}"
        ends = f"{100 * twin['final_accuracy']:.1f} % in bf16 and {100 * other['final_accuracy']:.1f} % in TF32"
        apart = max(abs(one - two) for one, two in zip(twin["test_accuracy"], other["test_accuracy"], strict=True))
        said.append(
            f"{other['label']} on {where}, seed {other['seed']}, ends at {ends}; no round differs by more than "
            f"{100 * apart:.1f} points."
        )
    return fill(" ".join(["**bf16** was used for CIFAR-10.", *said]), 120)
