"""Nested tensors, flattened and rebuilt: dicts and tuples by a fast path, anything else by torch's pytree.

A round of a small model takes a few milliseconds, and pytree's general path through a handful of tensors would be a
tenth of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

Spec = Any  # None for a leaf, else (type, keys, specs of the parts); hashable


def flatten(nest: Any) -> tuple[list[Any], Spec]:
    """The leaves of a nest in order, and what is left when they are taken out."""
    leaves: list[Any] = []
    return leaves, _take(nest, leaves)


def leaves(nest: Any) -> list[Any]:
    return flatten(nest)[0]


def leaves_as(nest: Any, spec: Spec) -> list[Any]:
    """The leaves of a nest in the order of another with the same structure, whose dicts may be ordered differently."""
    found, own = flatten(nest)
    if own == spec:
        return found
    try:
        return list(_sorted(nest, spec))
    except (KeyError, TypeError, ValueError):
        raise TypeError(
            f"a step returned a carry with another structure than the one it got: {own}, not {spec}"
        ) from None


def _sorted(nest: Any, spec: Spec) -> Iterator[Any]:
    if spec is None:
        if not isinstance(nest, Tensor):
            raise TypeError
        yield nest
        return
    kind, about, parts = spec
    if kind is pytree:
        found, own = pytree.tree_flatten(nest)
        if own != about:
            raise TypeError
        yield from found
        return
    if type(nest) is not kind or len(nest) != len(parts):
        raise TypeError
    for part, below in zip([nest[key] for key in about] if kind is dict else nest, parts, strict=True):
        yield from _sorted(part, below)


def unflatten(leaves: list[Any], spec: Spec) -> Any:
    """The nest again."""
    return _give(iter(leaves), spec)


def map_(function: Callable[..., Any], *nests: Any) -> Any:
    """function(leaf, leaf, ...) over nests of the same structure."""
    flat = [flatten(nest) for nest in nests]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ValueError(f"nests of different structure: {[spec for _, spec in flat]}")
    return unflatten([function(*same) for same in zip(*(found for found, _ in flat), strict=True)], flat[0][1])


def _take(nest: Any, leaves: list[Any]) -> Spec:
    kind = type(nest)
    if kind is Tensor:
        leaves.append(nest)
        return None
    if kind is dict:
        return dict, tuple(nest), tuple([_take(part, leaves) for part in nest.values()])
    if kind is tuple or (isinstance(nest, tuple) and hasattr(nest, "_fields")):
        return kind, None, tuple([_take(part, leaves) for part in nest])
    if isinstance(nest, Tensor) or pytree.tree_is_leaf(nest):
        leaves.append(nest)
        return None
    found, spec = pytree.tree_flatten(nest)
    leaves += found
    return pytree, spec, len(found)


def _give(leaves: Iterator[Any], spec: Spec) -> Any:
    if spec is None:
        return next(leaves)
    kind, about, parts = spec
    if kind is dict:
        return {key: _give(leaves, part) for key, part in zip(about, parts, strict=True)}
    if kind is pytree:
        return pytree.tree_unflatten([next(leaves) for _ in range(parts)], about)
    given = [_give(leaves, part) for part in parts]
    return tuple(given) if kind is tuple else kind(*given)
