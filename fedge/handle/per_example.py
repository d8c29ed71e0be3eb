"""Squared gradients of single examples, where no layer's rule gives them in one pass: every example is a client.

Examples share their parameters, so B examples are B clients with the same ones, and the batched gradient of clients is
that of examples. It needs B copies of the gradient; many examples are therefore done in blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fedge.core import Params
from fedge.handle.stacked.rule import leading
from fedge.handle.written import batch_and_params
from fedge.inputs import Spec, flatten, map_

MOST = 1 << 25  # numbers that the gradients of a block of examples may have together


class SquaredExamples(Function):
    """sum_i (d loss_i / d w)^2 for the parameters `names`; the first `held` of them are held."""

    @staticmethod
    def forward(program: Any, names: tuple[str, ...], held: int, spec: Spec, *tensors: Tensor) -> tuple[Tensor, ...]:
        parts = [part.unsqueeze(0) for part in tensors]
        return tuple(leaf.squeeze(0) for leaf in _squares(program, names, held, spec, parts))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], program: Any, names: tuple[str, ...], held: int, spec: Spec, *tensors: Tensor) -> Any:  # fmt: skip # noqa: E501
        parts = [leading(tensor, dim, info.batch_size) for tensor, dim in zip(tensors, in_dims[4:], strict=True)]
        return _squares(program, names, held, spec, parts), (0,) * (len(names) - held)


def _squares(program: Any, names: tuple[str, ...], held: int, spec: Spec, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """For J clients, x [J, B, ...] and leaves [J, ...]; the first `held` leaves are not differentiated."""
    x, y, mask, key, leaves = batch_and_params(names, spec, tensors)
    wanted = names[held:]
    total = {name: torch.zeros_like(leaves[name]) for name in wanted}
    step = max(1, MOST // sum(leaf.numel() for leaf in leaves.values()))
    for begin in range(0, mask.shape[1], step):
        some = slice(begin, begin + step)
        jobs, count = mask[:, some].shape
        alone = map_(lambda part, some=some: part[:, some].flatten(0, 1).unsqueeze(1), x)
        labels = y[:, some].flatten(0, 1).unsqueeze(1)
        params = {name: _each(leaf, count) for name, leaf in leaves.items()}
        real = mask.new_ones(jobs * count, 1)
        found = program.many(alone, labels, real, _each(key, count), params)
        for name in wanted:
            squares = found[name].square().unflatten(0, (jobs, count))
            total[name] += _masked(squares, mask[:, some]).sum(1)
    return tuple(total[name] for name in wanted)


def _each(leaf: Tensor, count: int) -> Tensor:
    """What a client has, for each of its examples: [J, ...] -> [J * B, ...]."""
    return leaf.unsqueeze(1).expand(-1, count, *leaf.shape[1:]).flatten(0, 1)


def _masked(squares: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.view(*mask.shape, *[1] * (squares.dim() - 2)), squares, 0.0)


def squared_examples(program: Any, params: Params, held: Params, batch: Any) -> Params:
    """By name, for the parameters that are not held."""
    names = (*held, *(name for name in params if name not in held))
    parts, spec = flatten(batch.x)
    tensors = (*parts, *batch[1:], *(params[name] for name in names))
    found = SquaredExamples.apply(program, names, len(held), spec, *tensors)  # type: ignore[no-untyped-call]
    return dict(zip(names[len(held) :], found, strict=True))
