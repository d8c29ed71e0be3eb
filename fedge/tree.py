"""Arithmetic on dict[str, Tensor]: the vectors of every algorithm here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Params = dict[str, Tensor]


def map_(function: Callable[..., Tensor], *trees: Params) -> Params:
    """Apply `function` to the tensors of the same name."""
    first, *rest = trees
    return {name: function(leaf, *(tree[name] for tree in rest)) for name, leaf in first.items()}


def is_finite(nest: Any) -> bool:
    """Whether there is no NaN or infinity in any tensor of a nest of dicts, lists and tuples."""
    leaves: dict[torch.dtype, list[Tensor]] = {}
    for leaf in pytree.tree_leaves(nest):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
            leaves.setdefault(leaf.dtype, []).append(leaf)
    return all(
        bool(torch.isfinite(torch.stack(torch._foreach_norm(some, torch.inf)).sum())) for some in leaves.values()
    )


def zeros_like(a: Params) -> Params:
    return map_(torch.zeros_like, a)


def add(a: Params, b: Params) -> Params:
    return map_(torch.add, a, b)


def sub(a: Params, b: Params) -> Params:
    return map_(torch.sub, a, b)


def mul(a: Params, b: Params) -> Params:
    """The element-wise product."""
    return map_(torch.mul, a, b)


def scale(c: float | Tensor, a: Params) -> Params:
    return map_(lambda leaf: c * leaf, a)


def axpy(c: float | Tensor, a: Params, b: Params) -> Params:
    """c * a + b."""
    if isinstance(c, Tensor):
        return map_(lambda x, y: c * x + y, a, b)
    return map_(lambda x, y: torch.add(y, x, alpha=c), a, b)


def dot(a: Params, b: Params) -> Tensor:
    """The inner product over all tensors, a scalar."""
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()


def norm(a: Params) -> Tensor:
    return dot(a, a).sqrt()


def stack(trees: Sequence[Params]) -> Params:
    """Trees of one shape -> one tree with a leading axis."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def take(a: Params, index: int | Tensor) -> Params:
    """One entry, or several, of the leading axis."""
    return {name: leaf[index] for name, leaf in a.items()}


def nbytes(a: Params) -> int:
    return sum(leaf.nbytes for leaf in a.values())


def size(a: Params) -> int:
    """The number of scalars, the d of the papers."""
    return sum(leaf.numel() for leaf in a.values())
