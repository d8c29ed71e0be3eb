"""Entries of stacked tensors, each known by its place: kept as the stacks they were made in, never one by one.

A thousand models as a thousand dicts of views cost more to make, and Python's collector more to look through, than
all the arithmetic between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fedge.core import Payload
from fedge.edge.draws import Array


class Shelf:
    """`stacks` has payloads [K, ...] by the place of their first entry; a stack goes when all its entries were let go.

    Places count on from stack to stack, so a place alone says which entry of which stack it is.
    """

    def __init__(self, end: int = 0, stacks: dict[int, Payload] | None = None, used: dict[int, int] | None = None):
        self.end, self.stacks, self.used = end, stacks or {}, used or {}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Self:
        """A copy that may be changed."""
        return cls(plain["end"], dict(plain["stacks"]), dict(plain["used"]))

    def plain(self) -> dict[str, Any]:
        return {"end": self.end, "stacks": self.stacks, "used": self.used}

    def put(self, stack: Payload, height: int, used: int | None = None) -> int:
        """The place of its first entry; `used` says how many entries will be let go (None: all)."""
        first, self.end = self.end, self.end + height
        self.stacks[first], self.used[first] = stack, height if used is None else used
        return first

    def take(self, places: Array) -> Payload:
        """The entries at these places, in this order, [K, ...]."""
        firsts, which = self._of(places)
        there = np.unique(which)
        if len(there) == 1:
            return _entries(self.stacks[int(firsts[there[0]])], places - firsts[there[0]])
        order = which.argsort(kind="stable")
        parts = [
            _entries(self.stacks[int(firsts[one])], places[which == one] - firsts[one]) for one in there
        ]  # by stack, each in the order asked for
        return _entries(_joined(parts), order.argsort())

    def let_go(self, places: Array) -> None:
        """Nobody will ask for these again."""
        firsts, which = self._of(places)
        for first, count in zip(firsts.tolist(), np.bincount(which, minlength=len(firsts)).tolist(), strict=True):
            self.used[first] -= count
            if not self.used[first]:
                del self.stacks[first], self.used[first]

    def _of(self, places: Array) -> tuple[Array, Array]:
        """Where stacks begin, and which of them every place is in."""
        firsts = np.fromiter(self.stacks, np.int64, len(self.stacks))
        return firsts, np.searchsorted(firsts, places, "right") - 1


def _entries(stack: Payload, index: Array) -> Payload:
    where = torch.from_numpy(index)
    by_device = dict[torch.device, Tensor]()
    return {
        name: {
            key: leaf[by_device.setdefault(leaf.device, where.to(leaf.device, non_blocking=True))]
            for key, leaf in part.items()
        }
        for name, part in stack.items()
    }


def _joined(parts: list[Payload]) -> Payload:
    return {
        name: {key: torch.cat([one[name][key] for one in parts]) for key in part} for name, part in parts[0].items()
    }
