"""Gradient ascent: liars send the direction in which the loss on their own examples grows.

Their gradient is taken at the model that they were sent, all liars' examples together.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fedge import tree
from fedge.combine.stacked import squared_norms
from fedge.core import Batch, Model, Params

LONG = 20.0  # times the usual length of an upload


class Climb(NamedTuple):
    """What liars that climb know: the model, and all their own examples as one batch."""

    model: Model
    batch: Batch

    def slopes(self, params: Params, classes: list[int] | None) -> Params:
        """The gradient of the mean loss; of FedOVA's classes, one after another, that of each against the rest."""
        if classes is None:
            return self.model.grad(params, self.batch)
        sides = [self.batch._replace(y=(self.batch.y == label).long()) for label in classes]
        return tree.stack([self.model.grad(tree.take(params, at), side) for at, side in enumerate(sides)])


def against(part: Params, lies: Tensor, rows: Tensor, slopes: Params, strength: float) -> Params:
    """A part [J, ...] in which liars send a slope [...] or [R, ...], `strength` times as long as honest uploads.

    Its sign opposes what honest clients sent for the same row: some parts are updates, others gradients.
    """
    lengths, honest = squared_norms({"part": part}).sqrt(), ~lies if bool((~lies).any()) else lies
    found = {name: leaf.clone() for name, leaf in part.items()}
    stacked = any(slopes[name].dim() == leaf.dim() for name, leaf in part.items())
    for job in lies.nonzero().flatten().tolist():
        slope = tree.take(slopes, int(rows[job])) if stacked else slopes
        peers = honest & (rows == rows[job])
        peers = peers if bool(peers.any()) else honest
        toward = tree.dot(slope, {name: leaf[peers].sum(0) for name, leaf in part.items()})
        factor = strength * lengths[honest].median() / tree.norm(slope).double().clamp(min=1e-30)
        for name, leaf in found.items():
            leaf[job] = float(-factor if toward > 0 else factor) * slope[name]
    return found
