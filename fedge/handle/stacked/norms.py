"""Group and layer normalisation: the examples of all clients are one batch, scale and shift are each client's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fedge.handle.layer import arguments
from fedge.handle.stacked.rule import stacked

GROUP = {"input": None, "num_groups": None, "weight": None, "bias": None, "eps": 1e-5}
LAYER = {"input": None, "normalized_shape": None, "weight": None, "bias": None, "eps": 1e-5}


def group_norm(*args: Any, **options: Any) -> Tensor:
    x, groups, weight, bias, eps = arguments(args, options, GROUP)

    def normal(x: Tensor) -> Tensor:
        """[J, B, C, ...]"""
        return F.group_norm(x.flatten(0, 1), groups, eps=eps).view(x.shape)

    return _affine(
        lambda x, *rest: F.group_norm(x, groups, *_both(rest, weight), eps), normal, x, weight, bias, x.dim() - 2
    )


def layer_norm(*args: Any, **options: Any) -> Tensor:
    x, shape, weight, bias, eps = arguments(args, options, LAYER)
    return _affine(
        lambda x, *rest: F.layer_norm(x, shape, *_both(rest, weight), eps),
        lambda x: F.layer_norm(x, shape, eps=eps),
        x, weight, bias, None,
    )  # fmt: skip


def _both(rest: tuple[Tensor, ...], weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias again, of which either may be missing."""
    if len(rest) == 2:
        return rest[0], rest[1]
    if not rest:
        return None, None
    return (rest[0], None) if weight is not None else (None, rest[0])


def _affine(
    one: Callable[..., Tensor],
    normal: Callable[[Tensor], Tensor],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    behind: int | None,
) -> Tensor:
    """weight * normal(x) + bias; `behind` is the number of dimensions behind the channels, None: the vectors end x."""

    def many(x: Tensor, *rest: Tensor) -> Tensor:
        out = normal(x)
        scale, shift = _both(rest, weight)
        if scale is not None:
            out = out * _placed(scale, x, behind)
        return out if shift is None else out + _placed(shift, x, behind)

    found: Tensor = stacked(one, many, x, *(part for part in (weight, bias) if part is not None))
    return found


def _placed(vector: Tensor, x: Tensor, behind: int | None) -> Tensor:
    """A client's vector against its examples [J, B, ...]."""
    if behind is None:
        return vector.view(len(vector), *[1] * (x.dim() - vector.dim()), *vector.shape[1:])
    return vector.view(len(vector), 1, -1, *[1] * behind)
