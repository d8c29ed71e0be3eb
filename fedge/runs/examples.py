"""Whether the examples of two runs are the same, to rounding: data are computed on other machines a little differently.

Whole numbers have a checksum. Of the others there are a sum with a weight for every place, and the length: one value in
a million that changes by a typical one is found, and a difference of rounding is not. That is against accidents, as a
file that somebody edits between two runs.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from fedge.federation import Federation
from fedge.inputs import flatten

TOLERANCE = 1e-6  # of the length
ROWS = 4096  # at a time


def fingerprint(federation: Federation) -> Tensor:
    """Of who holds what, the examples and the test set: [parts, 2], float64."""
    data = federation.data
    inputs = [*flatten(data.train_x)[0], *flatten(data.test_x)[0]]
    parts = (federation.index, federation.offsets, data.train_y, data.test_y, *inputs)
    found = [_weighted(part) if part.is_floating_point() else _checksum(part) for part in parts]
    return torch.tensor(found, dtype=torch.float64)


def are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two fingerprints are of the same examples."""
    if one.shape != other.shape:
        return False
    return bool(((one - other).abs() <= TOLERANCE * one[:, 1:]).all())


def checksum(federation: Federation) -> int:
    """Of who holds what and of the training examples, to the last bit."""
    data, found = federation.data, 0
    for part in (federation.index, federation.offsets, *flatten(data.train_x)[0], data.train_y):
        found = zlib.crc32(_bytes(part), found)
    return found


def _bytes(part: Tensor) -> memoryview:
    return part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _checksum(part: Tensor) -> tuple[float, float]:
    return float(zlib.crc32(_bytes(part))), 0.0


def _weighted(part: Tensor) -> tuple[float, float]:
    """The weighted sum of all numbers, and their length."""
    rows = part.detach().unsqueeze(-1).flatten(1)
    across = (torch.arange(rows.shape[1], dtype=torch.float64) * math.sqrt(3) + 1).cos()
    total, squares = 0.0, 0.0
    for begin in range(0, len(rows), ROWS):
        some = rows[begin : begin + ROWS].cpu()
        some = some if some.dtype == torch.float64 else some.float()
        along = (torch.arange(begin, begin + len(some), dtype=torch.float64) * math.sqrt(2) + 1).cos()
        total += float(along @ (some @ across.to(some.dtype)).double())
        squares += float(torch.linalg.vector_norm(some, dim=1).double().square().sum())
    return (total, math.sqrt(squares)) if math.isfinite(total + squares) else (0.0, 0.0)  # huge: nothing is known
