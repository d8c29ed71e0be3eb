"""A handle for GPUs: convolutions as matrix products.

vmap turns the convolutions of J jobs into one grouped convolution, which cuDNN runs far below the speed of the same
arithmetic as batched matrix products. Here a convolution is written as patches times weights, in the channels-last
order in which neither needs a transpose, so that vmap makes a batched product of it. What has no rule here (groups,
dilation, strides other than one) stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from fedge.core import Batch, Params
from fedge.handle.plain import Handle


def patches(x: Tensor, kernel: tuple[int, int], padding: tuple[int, int]) -> tuple[Tensor, tuple[int, int, int]]:
    """[B, C, H, W] -> [B * H' * W', kh * kw * C], and (B, H', W'); the channels of a pixel stay together."""
    x = F.pad(x.permute(0, 2, 3, 1), (0, 0, padding[1], padding[1], padding[0], padding[0]))
    windows = x.unfold(1, kernel[0], 1).unfold(2, kernel[1], 1).permute(0, 1, 2, 4, 5, 3)  # [B, H', W', kh, kw, C]
    shape = windows.shape
    return windows.reshape(shape[0] * shape[1] * shape[2], -1), (shape[0], shape[1], shape[2])


class PatchConv(Function):
    """A convolution of stride one as a matrix product."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int]) -> tuple[Tensor, Tensor]:
        columns, shape = patches(x, (weight.shape[2], weight.shape[3]), padding)
        out = columns @ weight.permute(2, 3, 1, 0).reshape(-1, len(weight)) + bias
        return out.view(*shape, -1).permute(0, 3, 1, 2), columns

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, weight, _, ctx.padding = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], weight)

    @staticmethod
    @torch.no_grad()
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        columns, weight = ctx.saved_tensors
        out, channels, kh, kw = weight.shape
        flat = grads[0].permute(0, 2, 3, 1).reshape(-1, out)
        into = _into(grads[0], weight, ctx.padding) if ctx.needs_input_grad[0] else None
        slope = (flat.mT @ columns).view(out, kh, kw, channels).permute(0, 3, 1, 2)
        return into, slope, flat.sum(0), None


def _into(grad: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
    """The gradient in the input: the convolution of the output's with the flipped kernel."""
    kh, kw = weight.shape[2:]
    columns, shape = patches(grad, (kh, kw), (kh - 1 - padding[0], kw - 1 - padding[1]))
    flipped = weight.flip(2, 3).permute(2, 3, 0, 1).reshape(-1, weight.shape[1])  # [kh * kw * O, C]
    return (columns @ flipped).view(*shape, -1).permute(0, 3, 1, 2)


class WideConv(Function):
    """The same for layers with more weights than positions: the weights are left as they lie, the patches move."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int]) -> tuple[Tensor, Tensor]:
        columns, shape = patches(x, (weight.shape[2], weight.shape[3]), padding)
        columns = columns.unflatten(1, (-1, x.shape[1])).mT.flatten(1)  # [B * H' * W', C * kh * kw]
        out = columns @ weight.flatten(1).mT + bias
        return out.view(*shape, -1).permute(0, 3, 1, 2), columns

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, _, ctx.padding = inputs
        ctx.size = (x.shape[0], x.shape[2], x.shape[3])
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], weight)

    @staticmethod
    @torch.no_grad()
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        columns, weight = ctx.saved_tensors
        flat = grads[0].permute(0, 2, 3, 1).reshape(-1, len(weight))
        into = None
        if ctx.needs_input_grad[0]:
            moved = (flat @ weight.flatten(1)).unflatten(0, (ctx.size[0], -1)).mT  # [B, C * kh * kw, H' * W']
            into = F.fold(moved, ctx.size[1:], weight.shape[2:], padding=ctx.padding)
        return into, (flat.mT @ columns).view(weight.shape), flat.sum(0), None


class Patches(TorchFunctionMode):
    """Within it, plain two-dimensional convolutions go through `PatchConv`."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.conv2d and not kwargs and _is_plain(args):
            x, weight, bias, _, padding, _, _ = args
            positions = x.shape[0] * x.shape[2] * x.shape[3]
            rule: Any = PatchConv if positions > len(weight) else WideConv
            return rule.apply(x, weight, bias, _pair(padding))[0]
        return func(*args, **(kwargs or {}))


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _is_plain(args: tuple[Any, ...]) -> bool:
    if len(args) != 7 or args[2] is None or args[0].dim() != 4 or isinstance(args[4], str):
        return False
    kernel, padding = args[1].shape[2:], _pair(args[4])
    fits = padding[0] < kernel[0] and padding[1] < kernel[1]
    return fits and _pair(args[3]) == (1, 1) and _pair(args[5]) == (1, 1) and args[6] == 1


class FastHandle(Handle):
    """The same functions, with convolutions as products wherever a gradient is taken."""

    def grad(self, params: Params, batch: Batch) -> Params:
        with Patches():
            return super().grad(params, batch)
