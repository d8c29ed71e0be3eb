"""Numbers that a robust rule does not look at, beside a model and losses: bounded one by one, then averaged."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedge import tree
from fedge.core import Params, Payload

FAR = 10.0  # times the usual: what a number beside a model counts for at most, under a rule
WORSE = 3.0  # times the usual: what a loss counts for at most above its client's lowest


class Few(NamedTuple):
    """The small parts of some jobs of one task, [J, ...], their weights and row positions, [J]."""

    parts: Payload
    weights: Tensor
    positions: Tensor

    def to(self, device: torch.device) -> Few:
        parts = {n: tree.map_(lambda leaf: leaf.to(device), p) for n, p in self.parts.items()}
        return Few(parts, self.weights.to(device), self.positions.to(device))


def mean_type(leaf: Tensor) -> torch.dtype:
    """The type of the mean of such uploads."""
    return leaf.dtype if leaf.is_floating_point() else torch.float32


def bounded(leaf: Tensor) -> Tensor:
    """[J, ...] no further from 0 than ten times the usual, number by number: a rule does not look at small parts."""
    if not leaf.is_floating_point():
        return leaf
    usual = leaf.abs().sort(0).values[(len(leaf) - 1) // 2]
    most = FAR * usual.clamp(min=1.0)
    return torch.maximum(torch.minimum(leaf, most), -most)


def judged(leaf: Tensor) -> Tensor:
    """Losses of several points [J, ...], each above its client's lowest by at most three times what is usual there.

    They choose a point, so only differences within a client count. Compared with the lowest, a liar can speak against
    a point by what others say against it, and for one by saying nothing: it cannot outvote them by a number. Usual is
    the upper median; the common level is the median of the lowest.
    """
    losses = leaf.flatten(1) if leaf.dim() > 1 else leaf[:, None]
    lowest = losses.amin(1, keepdim=True)
    above = (losses - lowest).nan_to_num(nan=torch.inf)
    most = WORSE * above.sort(0).values[len(losses) // 2]
    return (lowest.median(0).values + torch.minimum(above, most)).view_as(leaf)


def bounded_part(name: str, part: Params, losses: Collection[str]) -> Params:
    return tree.map_(judged if name in losses else bounded, part)


def mean(part: Params, weights: Tensor) -> Params:
    share = weights.double() / weights.double().sum()
    return tree.map_(lambda leaf: torch.tensordot(share, leaf.double(), dims=1).to(mean_type(leaf)), part)


def bounded_means(some: Sequence[Few], rows: int | None, losses: Collection[str] = ()) -> Payload:
    """The means of all jobs' small parts, by row if there are any; a row that nobody answered holds zeros."""
    found: Payload = {}
    for name in dict.fromkeys(name for few in some for name in few.parts):
        mine = [few for few in some if name in few.parts]
        part = {key: torch.cat([few.parts[name][key] for few in mine]) for key in mine[0].parts[name]}
        weights = torch.cat([few.weights for few in mine])
        positions = torch.cat([few.positions for few in mine])
        if rows is None:
            found[name] = mean(bounded_part(name, part, losses), weights)
            continue
        chosen = [positions == row for row in range(rows)]
        empty = tree.map_(lambda leaf: leaf.new_zeros(leaf.shape[1:], dtype=mean_type(leaf)), part)
        found[name] = tree.stack(
            [
                mean(bounded_part(name, tree.take(part, one), losses), weights[one]) if bool(one.any()) else empty
                for one in chosen
            ]
        )
    return found
