"""Addressed draws for many clients at once: numbers that depend on the address alone, as in `fedge.keys`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedge.core import At
from fedge.keys import TIES, fold, fold_array

Array = NDArray[Any]
MASK = (1 << 64) - 1


def uniform(key: int, clients: Array, word: int = 0) -> Array:
    """Numbers in [0, 1), one per client."""
    words: Array = fold_array(fold_array(key, clients), word)
    found: Array = (words >> np.uint64(11)) * 2.0**-53
    return found


def lots(at: At, clients: Array) -> Array:
    """What decides between equals in a phase: else it would always be the lowest number of a client."""
    return uniform(fold(at.seed, TIES, at.round, at.phase), clients)


def is_below(limit: float, key: int, client: int, word: int = 0) -> bool:
    """Whether one client's uniform number is below a limit: for one, plain integers are faster than arrays."""
    return ((fold(key, client, word) & MASK) >> 11) * 2.0**-53 < limit


def normal(key: int, clients: Array, word: int = 0) -> Array:
    """Standard normal numbers, one per client (Box and Muller, 1958)."""
    one, two = (uniform(fold(key, word), clients, half) for half in (0, 1))
    found: Array = np.sqrt(-2 * np.log1p(-one)) * np.cos(2 * np.pi * two)
    return found


def exponential(key: int, clients: Array, word: int = 0) -> Array:
    """Exponential numbers of mean 1, one per client: the power of a Rayleigh fading channel, or a time to stay."""
    found: Array = -np.log1p(-uniform(key, clients, word))
    return found
