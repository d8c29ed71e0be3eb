"""Tasks that several algorithms share: one pass over a client's examples at the point that was sent.

Each averages something over the examples, so the size of its batches does not matter to the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedge import tree
from fedge.core import Batch, Params, Payload, Task

PASS_BATCH = 100  # examples at a time where nothing else decides it


def average(part: str, total: Callable[[Payload, Batch], Params], **options: Any) -> Task:
    """The task that uploads, as `part`, the mean over the examples of what `total` sums up in a batch.

    The mean is over the examples that were visited, the weight is the client's number of examples n_k.
    """

    def start(sent: Payload) -> tuple[Params, Tensor]:
        zeros = tree.zeros_like(sent["params"])
        return zeros, next(iter(zeros.values())).new_zeros(())

    def step(sent: Payload, carry: tuple[Params, Tensor], batch: Batch) -> tuple[Params, Tensor]:
        return tree.add(carry[0], total(sent, batch)), carry[1] + batch.examples

    def finish(sent: Payload, carry: tuple[Params, Tensor], examples: Tensor) -> tuple[Payload, Tensor]:
        return {part: tree.scale(1 / carry[1], carry[0])}, examples.float()

    return Task(start, step, finish, **{"batch_size": PASS_BATCH, **options})
