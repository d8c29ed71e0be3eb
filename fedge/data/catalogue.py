"""Data sets by name."""

from collections.abc import Callable

from fedge.checks import nearest
from fedge.data.base import Data
from fedge.data.digits import load_digits

LOADERS: dict[str, Callable[[], Data]] = {"digits": load_digits}


def load(name: str) -> Data:
    """Load a data set by its name.

    >>> load("digits").classes
    10
    """
    if name not in LOADERS:
        raise ValueError(f"unknown data set {name!r}{nearest(name, LOADERS)}; known: {', '.join(LOADERS)}")
    return LOADERS[name]()
