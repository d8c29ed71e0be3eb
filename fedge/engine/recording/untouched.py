"""A step is pure: what it is given belongs to others, or to the next step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedge.engine.recording import pytree


@contextmanager
def untouched(closely: bool = False, **given: Any) -> Iterator[None]:
    """Refuse writing in place into what was given, by its name: other clients and later steps see the same.

    torch counts such writes, but for those through `.data`, numpy views and the like; `closely` compares the numbers as
    well, with a copy of them. A list is one of leaves.
    """
    flat = {name: nest if type(nest) is list else pytree.leaves(nest) for name, nest in given.items()}
    leaves = {name: [leaf for leaf in found if isinstance(leaf, Tensor)] for name, found in flat.items()}
    before = {name: [leaf._version for leaf in found] for name, found in leaves.items()}
    copies = {name: [leaf.detach().clone() for leaf in found] for name, found in leaves.items()} if closely else {}
    yield
    for name, found in leaves.items():
        if [leaf._version for leaf in found] != before[name]:
            _refuse(name, "")
        if closely and not all(map(_same, copies[name], found)):
            _refuse(name, " past torch's count of such writes (through .data, numpy or a detached tensor)")


def _refuse(name: str, how: str) -> None:
    raise RuntimeError(
        f"a step wrote in place into its argument '{name}'{how}, which it shares with other clients or steps: "
        "return new tensors (a + b in place of a += b, torch.where in place of a[mask] = b)"
    )


def _same(before: Tensor, after: Tensor) -> bool:
    """NaN is the same as NaN."""
    if torch.equal(before, after):
        return True
    return bool(((before == after) | ((before != before) & (after != after))).all())
