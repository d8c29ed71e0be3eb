"""Gradient ascent: liars send the direction in which the loss on their own examples grows.

Their gradient is taken at the model that they were sent, all liars' examples together.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedge import tree
from fedge.core import Loss, Params

LONG = 20.0  # times the usual length of an upload


class Climb(NamedTuple):
    """What liars that climb know: the network, the loss, and their own examples."""

    model: nn.Module
    loss: Loss
    x: Tensor
    y: Tensor

    def slopes(self, params: Params, classes: list[int] | None) -> Params:
        """The gradient of the mean loss; of FedOVA's classes, one after another, that of each against the rest."""
        if classes is None:
            return self._slope(params, self.y)
        each = [self._slope(tree.take(params, at), (self.y == label).long()) for at, label in enumerate(classes)]
        return tree.stack(each)

    @torch.enable_grad()
    def _slope(self, params: Params, y: Tensor) -> Params:
        model = copy.deepcopy(self.model).to(self.x.device).eval()
        leaves = {name: leaf.detach().clone().requires_grad_(True) for name, leaf in params.items()}
        loss = self.loss(torch.func.functional_call(model, leaves, (self.x.to(next(iter(params.values())).dtype),)), y)
        return dict(zip(leaves, torch.autograd.grad(loss.mean(), list(leaves.values())), strict=True))


def against(part: Params, lies: Tensor, rows: Tensor, slopes: Params, strength: float) -> Params:
    """A part [J, ...] in which liars send a slope [...] or [R, ...], `strength` times as long as honest uploads.

    Its sign opposes what honest clients sent for the same row: some parts are updates, others gradients.
    """
    lengths = torch.stack([leaf.double().flatten(1).square().sum(1) for leaf in part.values()]).sum(0).sqrt()
    usual = lengths[~lies].median() if bool((~lies).any()) else lengths.median()
    found = {name: leaf.clone() for name, leaf in part.items()}
    stacked = any(slopes[name].dim() == leaf.dim() for name, leaf in part.items())
    for job in lies.nonzero().flatten().tolist():
        slope = tree.take(slopes, int(rows[job])) if stacked else slopes
        peers = ~lies & (rows == rows[job])
        peers = peers if bool(peers.any()) else ~lies
        toward = sum(float((slope[name] * leaf[peers].sum(0)).sum()) for name, leaf in part.items())
        length = tree.dot(slope, slope).double().sqrt().clamp(min=1e-30)
        factor = float(strength * usual / length) * (-1.0 if toward > 0 else 1.0)
        for name in found:
            found[name][job] = factor * slope[name]
    return found
