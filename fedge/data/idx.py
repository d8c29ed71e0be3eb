"""The idx format of the MNIST family: two zero bytes, a type, the number of axes, their sizes, then the values."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from fedge.data.errors import DataError
from fedge.data.files import AGAIN

UNSIGNED_BYTE = 0x08


def parse_idx(where: object, content: bytes, axes: int) -> NDArray[np.uint8]:
    """An array of unsigned bytes with so many axes; `where` names the file in errors."""
    head = 4 + 4 * axes
    if len(content) < head:
        raise DataError(f"{where} has {len(content)} bytes, fewer than an idx header: {AGAIN}")
    if content[:4] != bytes([0, 0, UNSIGNED_BYTE, axes]):
        raise DataError(f"{where} is no idx file of bytes with {axes} axes: it starts with {content[:4].hex()}")
    shape = tuple(np.frombuffer(content, ">u4", axes, 4).tolist())
    if len(content) - head != prod(shape):
        raise DataError(
            f"{where} has {len(content) - head} values, its header says {' x '.join(map(str, shape))}: {AGAIN}"
        )
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)
