"""Convolutions of J clients on a CPU: client by client, because torch's own kernels are faster than anything batched.

vmap would make one convolution of J groups, which takes several times as long. Everything between the convolutions is
batched all the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fedge.handle.layer import arguments
from fedge.handle.stacked.rule import stacked

aten = torch.ops.aten
NAMES = {"input": None, "weight": None, "bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
DIMENSIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}


def convolution(func: Any, *args: Any, **options: Any) -> Any:
    a, weight, bias, stride, padding, dilation, groups = arguments(args, options, NAMES)
    dimensions = DIMENSIONS[func]
    if isinstance(padding, str) or a.dim() != dimensions + 2:
        return NotImplemented
    settings = tuple(_each(part, dimensions) for part in (stride, padding, dilation))

    def one(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found: Tensor = func(a, weight, bias, *settings, groups)
        return found

    def many(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return ByClient.apply(a, weight, bias, settings, groups)  # type: ignore[no-untyped-call]

    return stacked(one, many, *((a, weight) if bias is None else (a, weight, bias)))


def _each(size: Any, dimensions: int) -> list[int]:
    return [size] * dimensions if isinstance(size, int) else list(size)


class ByClient(Function):
    """a [J, B, C, ...], weight [J, O, ...], bias [J, O]."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor, bias: Tensor | None, settings: Any, groups: int) -> Tensor:
        ctx.save_for_backward(a, weight)
        ctx.settings, ctx.groups, ctx.has_bias = settings, groups, bias is not None
        biases = [None] * len(a) if bias is None else bias.unbind()
        nothing = [0] * len(settings[0])
        return torch.stack([
            aten.convolution(one, kernel, shift, *settings, False, nothing, groups)
            for one, kernel, shift in zip(a.unbind(), weight.unbind(), biases, strict=True)
        ])  # fmt: skip

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, weight = ctx.saved_tensors
        sizes = [weight.shape[1]] if ctx.has_bias else None
        wanted = [*ctx.needs_input_grad[:2], ctx.has_bias]
        nothing = [0] * len(ctx.settings[0])
        found = [
            aten.convolution_backward(g, one, kernel, sizes, *ctx.settings, False, nothing, ctx.groups, wanted)
            for g, one, kernel in zip(grads[0].unbind(), a.unbind(), weight.unbind(), strict=True)
        ]
        parts = [torch.stack(part) if part[0] is not None else None for part in zip(*found, strict=True)]
        return *parts, None, None
