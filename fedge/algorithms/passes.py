"""Tasks that several algorithms share: one pass over a client's examples at the point that was sent.

Each averages something over the examples, so the size of its batches does not matter to the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedge import tree
from fedge.core import Batch, Carry, Model, Params, Payload, Task

PASS_BATCH = 100  # examples at a time where nothing else decides it
_HUGE = 1e30  # what stands for a loss that overflowed, where its type has such numbers


def _like_params(sent: Payload) -> Params:
    return tree.zeros_like(sent["params"])


def average(
    part: str,
    total: Callable[[Payload, Batch], Params],
    zeros: Callable[[Payload], Params] = _like_params,
    **options: Any,
) -> Task:
    """The task that uploads, as `part`, the mean over the examples of what `total` sums up in a batch.

    The mean is over the examples that were visited, the weight is the client's number of examples n_k. `zeros` has the
    names and shapes of the sum, by default those of the parameters.
    """

    def start(sent: Payload) -> tuple[Params, Tensor]:
        nothing = zeros(sent)
        return nothing, next(iter(nothing.values())).new_zeros(())

    def step(sent: Payload, carry: tuple[Params, Tensor], batch: Batch) -> tuple[Params, Tensor]:
        return tree.add(carry[0], total(sent, batch)), carry[1] + batch.examples

    def finish(sent: Payload, carry: tuple[Params, Tensor], examples: Tensor) -> tuple[Payload, Tensor]:
        return {part: tree.scale(1 / carry[1], carry[0])}, examples.float()

    return Task(start, step, finish, **{"batch_size": PASS_BATCH, **options})


def losses_at(model: Model, points: Callable[[Payload], list[Params]]) -> Task:
    """The task that uploads the client's mean loss at each of the points, as {"losses": {"at": [q]}}.

    A loss that overflows is replaced by a huge one, so that its point is merely not chosen.
    """

    def start(sent: Payload) -> Carry:
        return next(iter(sent["params"].values())).new_zeros(len(points(sent)))

    def step(sent: Payload, carry: Carry, batch: Batch) -> Carry:
        return carry + torch.stack([model.losses(point, batch).sum() for point in points(sent)])

    def finish(sent: Payload, carry: Carry, examples: Tensor) -> tuple[Payload, Tensor]:
        huge = min(_HUGE, torch.finfo(carry.dtype).max)
        mean = torch.nan_to_num(carry / examples, nan=huge, posinf=huge, neginf=huge)
        return {"losses": {"at": mean.clamp(max=huge)}}, examples.float()

    return Task(start, step, finish, batch_size=PASS_BATCH, losses=("losses",))


def lowest(losses: Tensor, points: list[Params], weight_decay: float) -> int:
    """The place of the smallest loss, the penalty weight_decay / 2 |w|^2 of each point added here."""
    if weight_decay:
        losses = losses + weight_decay / 2 * torch.stack([tree.dot(point, point) for point in points])
    return int(torch.nan_to_num(losses, nan=torch.inf).argmin())
