"""Whether a model is still of use, by what is known of the run so far.

Lies that look like uploads can spoil a model little by little. A round is *sound* if its test loss is finite, and not
ten times that of the first round or absurd, its accuracy is at least half of the best so far, and no parameter is a
thousand times as large as the largest was at first (or 1). What a server keeps beside the model, such as a control or a
momentum, shows in the next round at the earliest. So a checkpoint is known to be sound once a sound round came from it,
and the newest of these is kept as `good.pt` beside one that is not, or of which nothing is known yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedge.core import Params
from fedge.runs.run import Record, has_diverged

LOSS, ACCURACY, LARGEST = 10.0, 0.5, 1000.0


def is_evaluated(record: Record) -> bool:
    return "test_loss" in record


def is_sound(history: Sequence[Record], limit: float) -> bool:
    """Whether the last round that was evaluated was sound; a loss over `limit` is absurd."""
    known = [record for record in history if is_evaluated(record)]
    if not known or has_diverged(known[-1], limit):
        return False
    first, last = known[0]["test_loss"], known[-1]["test_loss"]
    if first is not None and first > 0 and last > LOSS * first:
        return False
    best = max((record.get("test_accuracy") or 0.0 for record in known), default=0.0)
    return (known[-1].get("test_accuracy") or 0.0) >= ACCURACY * best


def is_stuck(history: Sequence[Record]) -> bool:
    """Whether the last round was skipped because numbers were not finite: what the state holds beside the model may be
    why."""
    return bool(history) and "not finite" in str(history[-1].get("skipped", ""))


def largest(params: Params) -> float:
    """The largest magnitude of all parameters."""
    leaves = [leaf for leaf in params.values() if leaf.numel()]
    return float(torch.stack([leaf.detach().abs().max().double() for leaf in leaves]).max()) if leaves else 0.0


def has_grown(params: Params, first: float) -> bool:
    """Whether parameters that were at most `first` are absurdly large now, or not numbers."""
    return not largest(params) <= LARGEST * max(1.0, first)
