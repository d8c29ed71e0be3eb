"""What is said once per process, however often it comes up."""

from __future__ import annotations

from collections.abc import Hashable

_TOLD: set[Hashable] = set()


def is_new(thing: Hashable) -> bool:
    """Whether this comes up for the first time: then it is worth a line in the log."""
    new = thing not in _TOLD
    _TOLD.add(thing)
    return new
