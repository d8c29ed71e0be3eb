"""Arithmetic on uploads that are stacked on a leading axis, [J, ...]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedge.core import Payload


def coordinates(rule: Callable[[Tensor], Tensor], uploads: Payload) -> Payload:
    """A rule [J, ...] -> [...] on every tensor."""
    return {part: {name: rule(_real(leaf)) for name, leaf in leaves.items()} for part, leaves in uploads.items()}


def squared_norms(uploads: Payload) -> Tensor:
    """The squared length of every upload over all its tensors, [J], in float64 where a sum of squares may overflow."""
    squares = [flat(leaf).double().square().sum(1) for leaves in uploads.values() for leaf in leaves.values()]
    return torch.stack(squares).sum(0)


def times(leaf: Tensor, factor: Tensor) -> Tensor:
    """Every upload by a factor of its own, [J, ...] and [J]."""
    return _real(leaf) * factor.to(_real(leaf).dtype).view(-1, *[1] * (leaf.dim() - 1))


def flat(leaf: Tensor) -> Tensor:
    """[J, ...] -> [J, n]."""
    return leaf.reshape(len(leaf), -1)


def _real(leaf: Tensor) -> Tensor:
    return leaf if leaf.is_floating_point() else leaf.float()
