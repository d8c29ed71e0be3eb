"""Before a checkpoint is written: what could not be read from it again is refused, with its place."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedge.runs.checkpoint import DEPTH, PARTS, SAME, CheckpointError

PLAIN = (type(None), bool, int, float, str)
HINT = "a state may hold dicts, lists, tuples, tensors, numbers and None"


def keepable(content: dict[str, Any]) -> dict[str, Any]:
    """The same, with numbers of NumPy as Python's, and with numbers written out that stand for very many."""
    left = iter(range(PARTS))
    return {name: _plain(part, name, 1, left) for name, part in content.items()}


def _plain(one: Any, place: str, depth: int, left: Iterator[int]) -> Any:
    if depth > DEPTH or next(left, None) is None:
        raise CheckpointError(f"a checkpoint has at most {PARTS} parts, {DEPTH} deep, and {place[:100]} has more")
    if type(one) in (dict, OrderedDict):
        keys = [_readable(_number(key), f"a key of {place}") for key in one]
        parts = [_plain(part, f"{place}[{key!r}]", depth + 1, left) for key, part in one.items()]
        return type(one)(zip(keys, parts, strict=True))
    if type(one) in (list, tuple):
        return type(one)(_plain(part, f"{place}[{at}]", depth + 1, left) for at, part in enumerate(one))
    if type(one) in (Tensor, nn.Parameter):
        return _whole(one, place)
    return _readable(_number(one), place)


def _number(one: Any) -> Any:
    """Those of NumPy that compute as Python's do."""
    return one.item() if isinstance(one, np.float64 | np.integer | np.bool_) else one


def _whole(leaf: Tensor, place: str) -> Tensor:
    if leaf.layout != torch.strided or leaf.is_meta:
        raise CheckpointError(f"{place} is a tensor of kind {leaf.layout} on {leaf.device}, which no checkpoint keeps")
    own = leaf.numel() * leaf.element_size()
    return leaf.contiguous() if own > max(SAME, leaf.untyped_storage().nbytes()) else leaf


def _readable(one: Any, place: str) -> Any:
    if type(one) in PLAIN:
        return one
    buffer = io.BytesIO()
    try:
        torch.save(one, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True, map_location="cpu")
    except Exception as error:  # of many kinds
        kind = f"{type(one).__module__}.{type(one).__qualname__}"
        raise CheckpointError(f"{place} is a {kind}, which cannot be read from a checkpoint again: {HINT}") from error
    return one
