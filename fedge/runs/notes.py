"""What an algorithm says of a round, as a record can hold it: numbers, words and lists, under names of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fedge.runs.run import Record

BYTES_AND_TIMES = {"up_bytes", "down_bytes", "seconds", "virtual_seconds", "joules"}
WHO = {"cohort", "cohort_names", "dropped", "skipped", "late", "timeline", "phases", "faults"}
OWN = {"round"} | BYTES_AND_TIMES | WHO  # what training itself says in a record
JUDGED = ("test_", "train_")  # and how the names of what was evaluated begin


def noted(notes: Mapping[str, Any]) -> Record:
    """The notes of a round; one that is called like a field of the record, or is no JSON, is refused by its name."""
    for name in notes:
        if name in OWN or str(name).startswith(JUDGED):
            raise ValueError(f"the note {name!r} is a field of the record that algorithms cannot set: rename it")
    return {name: _written(name, value) for name, value in notes.items()}


def _written(name: str, value: Any) -> Any:
    try:
        found = _plain(value)
        json.dumps({name: found})
    except (TypeError, ValueError, RecursionError) as error:
        what = " ".join(str(error).split())[:100]
        raise ValueError(
            f"the note {name!r} cannot be written ({what}): note numbers, strings, lists or dicts"
        ) from None
    return found


def _plain(value: Any) -> Any:
    """Single numbers of NumPy and torch as Python's."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(_plain(one) for one in value)
    single = isinstance(value, np.generic) or (isinstance(value, np.ndarray | Tensor) and np.prod(value.shape) == 1)
    return value.item() if single else value
