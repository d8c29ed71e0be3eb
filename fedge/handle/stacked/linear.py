"""z = a W^T + b with the weights of each client: one product per client, whatever the shape of its examples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fedge.handle.layer import arguments
from fedge.handle.stacked.rule import stacked

NAMES = {"input": None, "weight": None, "bias": None}


def linear(*args: Any, **options: Any) -> Tensor:
    a, weight, bias = arguments(args, options, NAMES)
    tensors = (a, weight) if bias is None else (a, weight, bias)
    found: Tensor = stacked(F.linear, many, *tensors)
    return found


def many(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [J, ..., D], weight [J, O, D], bias [J, O]."""
    found: Tensor = Linear.apply(a, weight, bias)  # type: ignore[no-untyped-call]
    return found


class Linear(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = a.reshape(len(a), -1, a.shape[-1])
        ctx.save_for_backward(flat, weight)
        ctx.shape, ctx.has_bias = a.shape, bias is not None
        if weight.stride(0) == 0 and len(weight) > 1:  # all clients share it: one product for all
            out = flat.flatten(0, 1) @ weight[0].T
            out = out if bias is None else out.view(*flat.shape[:2], -1) + bias.unsqueeze(1)
        else:
            out = flat @ weight.mT if bias is None else torch.baddbmm(bias.unsqueeze(1), flat, weight.mT)
        found: Tensor = torch.ops.aten._unsafe_view(out, [*a.shape[:-1], weight.shape[1]])
        return found  # no view: a model may write into it

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight = ctx.saved_tensors
        g = grads[0].reshape(*flat.shape[:2], -1)
        shared = weight.stride(0) == 0 and len(weight) > 1
        into = None
        if ctx.needs_input_grad[0]:
            into = (g.flatten(0, 1) @ weight[0] if shared else g @ weight).view(ctx.shape)
        slope = g.mT @ flat if ctx.needs_input_grad[1] else None
        return into, slope, g.sum(1) if ctx.has_bias and ctx.needs_input_grad[2] else None
