"""Data sets by name."""

import difflib
from collections.abc import Callable

from fedge.data.base import Data
from fedge.data.digits import load_digits

LOADERS: dict[str, Callable[[], Data]] = {"digits": load_digits}


def load(name: str) -> Data:
    """Load a data set by its name.

    >>> load("digits").classes
    10
    """
    if name not in LOADERS:
        nearest = difflib.get_close_matches(name, LOADERS, n=1, cutoff=0.75)[0]
        raise ValueError(f"unknown data set {name!r}: did you mean {nearest!r}? Known: {', '.join(LOADERS)}")
    return LOADERS[name]()
