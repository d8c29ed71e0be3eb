"""What a model takes: one tensor, or several by name or in order, all with the examples first.

A tuple becomes the positional arguments of the model's `forward`, a dict its keyword arguments. Everywhere else the
examples of such a nest are chosen, moved and cut like those of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Inputs = Any  # Tensor | dict[str, Tensor] | tuple[Tensor, ...]; mypy cannot index such a union
Spec = Any  # None: one tensor; a tuple of names: a dict; a number: a tuple of so many


def flatten(x: Inputs) -> tuple[list[Tensor], Spec]:
    """The tensors, and how they belong together."""
    if isinstance(x, Tensor):
        return [x], None
    return (list(x.values()), tuple(x)) if isinstance(x, dict) else (list(x), len(x))


def rebuild(parts: Iterable[Tensor], spec: Spec) -> Inputs:
    """The inputs again."""
    if spec is None:
        return next(iter(parts))
    return dict(zip(spec, parts, strict=True)) if isinstance(spec, tuple) else tuple(parts)


def map_(function: Callable[..., Any], x: Inputs, *more: Inputs) -> Inputs:
    """function of every tensor."""
    if isinstance(x, Tensor):
        return function(x, *more)
    parts, spec = flatten(x)
    return rebuild([function(*same) for same in zip(parts, *(flatten(one)[0] for one in more), strict=True)], spec)


def take(x: Inputs, index: Any) -> Inputs:
    """Some examples: x[index] of every tensor."""
    return x[index] if isinstance(x, Tensor) else map_(lambda part: part[index], x)


def leading(x: Inputs) -> Tensor:
    """The first tensor: all have as many examples, and lie on one device."""
    return x if isinstance(x, Tensor) else flatten(x)[0][0]


def count(x: Inputs) -> int:
    """How many examples there are."""
    return len(leading(x))


def cast(x: Inputs, dtype: torch.dtype) -> Inputs:
    """Floating-point tensors in a type, others as they are."""
    return map_(lambda part: part.to(dtype) if part.is_floating_point() else part, x)


def to(x: Inputs, device: torch.device | str) -> Inputs:
    return map_(lambda part: part.to(device), x)


def nbytes(x: Inputs) -> int:
    return sum(part.nbytes for part in flatten(x)[0])


def numel(x: Inputs) -> int:
    return sum(part.numel() for part in flatten(x)[0])


def joined(some: Iterable[Inputs]) -> Inputs:
    """Examples one after another."""
    first, *rest = some
    return map_(lambda *parts: torch.cat(parts), first, *rest)


def arguments(x: Inputs) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Positional and keyword arguments of `forward`.

    >>> arguments({"image": torch.zeros(1)})
    ((), {'image': tensor([0.])})
    """
    if isinstance(x, Tensor):
        return (x,), {}
    return ((), x) if isinstance(x, dict) else (x, {})


def described(x: Inputs) -> str:
    """The shape and type of one example, in words."""
    if isinstance(x, Tensor):
        return f"shape {list(x.shape[1:])} and type {x.dtype}"
    parts, spec = flatten(x)
    names = spec if isinstance(spec, tuple) else range(len(parts))
    return ", ".join(f"{name!r} of {described(part)}" for name, part in zip(names, parts, strict=True))
