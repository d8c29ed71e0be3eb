"""Sequences of different lengths as one tensor."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedge.data.arrays import as_labels, as_tensor
from fedge.data.base import IGNORED


def pad(
    items: Sequence[Any], value: float = 0, ignored: int = IGNORED, length: int | None = None
) -> tuple[Any, Tensor]:
    """Sequences of different lengths, (x [T, ...], y), as {"x": [N, L, ...], "lengths": [N]} and y, padded at the end.

    L is the longest, or `length`. A target with one value per step of x is padded too, with `ignored` (whole numbers)
    or refused (floating-point ones, for which nothing is ignored). The model takes `x` and `lengths`.

    >>> x, y = pad([([5, 6], 0), ([7], 1)])
    >>> x["x"].tolist(), x["lengths"].tolist(), y.tolist()
    ([[5, 6], [7, 0]], [2, 1], [0, 1])
    """
    pairs = [(as_tensor("x", x), as_labels("y", y)) for x, y in items]
    lengths = [len(x) for x, _ in pairs]
    longest = max(lengths) if length is None else length
    if longest < max(lengths):
        raise ValueError(f"length is {length}, but there is an example of length {max(lengths)}: raise it, or cut them")
    y = [y for _, y in pairs]
    if any(one.ndim for one in y) and len({one.shape for one in y}) > 1:
        if y[0].is_floating_point():
            raise ValueError("y has one number per step, and steps differ: nothing says which numbers do not count")
        y = [_longer(one, longest, ignored) for one in y]
    elif all(one.ndim and len(one) == n for one, n in zip(y, lengths, strict=True)) and not y[0].is_floating_point():
        y = [_longer(one, longest, ignored) for one in y]
    return {
        "x": torch.stack([_longer(x, longest, value) for x, _ in pairs]),
        "lengths": torch.tensor(lengths),
    }, torch.stack(y)


def _longer(steps: Tensor, length: int, value: float) -> Tensor:
    rest = steps.new_full((length - len(steps), *steps.shape[1:]), value)
    return torch.cat([steps, rest])
