"""From "who owns each example" to "which examples each client owns"."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


class Owned(list[Indices]):
    """One index array per client, with the clients' names and the number of examples that were dealt out."""

    def __init__(self, clients: Iterable[Indices], names: Iterable[Any], examples: int) -> None:
        super().__init__(clients)
        self.names, self.examples = tuple(map(str, names)), examples


def split_by_owner(owner: NDArray[Any], clients: int) -> list[Indices]:
    """List each client's examples, ascending, given the owner of every example.

    >>> split_by_owner(np.array([1, 0, 1]), 2)
    [array([1]), array([0, 2])]
    """
    order = np.argsort(owner, kind="stable").astype(np.int64, copy=False)
    ends = np.cumsum(np.bincount(owner, minlength=clients))
    return np.split(order, ends[:-1])
