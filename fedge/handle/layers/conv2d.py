"""Convolutions of stride one; for the Fisher diagonal, of any stride, and of one dimension."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fedge.handle.layer import Call, NotAChain, Squared, Weighted, arguments, pair
from fedge.handle.patches import aligned, cut, output_size, padded, patches, put_back
from fedge.handle.tape import Many, One

aten = torch.ops.aten


@dataclass(frozen=True)
class Conv2d(Weighted):
    padding: tuple[int, int]

    @classmethod
    def match(cls, call: Call) -> Self | None:
        if call.target is not nn.Conv2d:
            return None
        name, part = call.name, call.part
        plain = part.groups == 1 and pair(part.stride) == (1, 1) and pair(part.dilation) == (1, 1)
        if not plain or isinstance(part.padding, str) or part.padding_mode != "zeros":
            raise NotAChain(f"'{name}' (Conv2d) has a stride, dilation, groups or padding without a rule")
        padding = pair(part.padding)
        if padding[0] >= part.kernel_size[0] or padding[1] >= part.kernel_size[1]:
            raise NotAChain(f"'{name}' (Conv2d) has more padding than its kernel is wide")
        return cls.named(call, padding=padding)

    def one(self, tape: One, x: Tensor) -> Tensor:
        first, padding = tape.is_first(), list(self.padding)
        weight, bias = self.values(tape.params)
        order = layout(x, weight)
        x = ordered(x, order)
        out = F.conv2d(x, weight, bias, padding=padding)

        def back(g: Tensor) -> Tensor:
            # On a GPU, and without an input gradient, rows of pixels are faster.
            g = ordered(g, torch.contiguous_format if first and g.is_cuda else order)
            wanted = [not first, True, self.bias is not None]
            into, slope, level = aten.convolution_backward(
                g, x, weight, [len(weight)], [1, 1], padding, [1, 1], False, [0, 0], 1, wanted
            )
            tape.grads[self.weight] = slope
            if self.bias is not None:
                tape.grads[self.bias] = level
            return g if first else into

        return tape.record(out.contiguous(memory_format=order), back)

    def many(self, tape: Many, x: Tensor) -> Tensor:
        """Weights times patches, with the weights as they are stored:

            out = W P + b        dW = dout P^T        db = dout 1        dP = W^T dout        dx = dP put back

        One product per job, images as [J, C, B, H, W]. In a layer with few weights that would be too few and too long
        sums for dW; there it is one product per example, on a copy of its job's weights, images as [J, B, C, H, W].
        """
        if x.dim() != 5:
            raise ValueError(f"'{self.name}' got examples of shape {list(x.shape[2:])}, expected [C, H, W]")
        weight, bias = self.values(tape.params)
        jobs, outputs, channels, *kernel = weight.shape
        size, depth = output_size(x, kernel, self.padding), channels * kernel[0] * kernel[1]
        per_job = jobs * tiles(outputs) * tiles(depth) >= enough(x)
        x, first = tape.turn(x, per_job), tape.is_first()
        examples = x.shape[2 if per_job else 1]
        x = tape.stored(padded(x, self.padding)) if any(self.padding) else x
        found = patches(x, kernel)  # [J, B, C, kh, kw, H', W'], or C before B
        if per_job:
            columns, rows = found.permute(0, 1, 3, 4, 2, 5, 6).reshape(jobs, depth, -1), weight.flatten(2)
        else:
            columns, rows = found.reshape(jobs * examples, depth, -1), _copies(weight.flatten(2), examples)
            bias = None if bias is None else _copies(bias, examples)
        columns, rows = tape.stored(aligned(columns, 1)), tape.stored(aligned(rows, 2))
        out = tape.product(None if bias is None else bias.unsqueeze(2), rows, columns)

        def back(g: Tensor) -> Tensor:
            g = tape.stored(g.reshape(out.shape))
            level = g.sum(2)
            if per_job:
                slope = g @ columns.mT
            else:
                slope = tape.sum_over_examples((columns @ g.mT).unflatten(0, (jobs, examples))).mT
                level = tape.sum_over_examples(level.unflatten(0, (jobs, examples)))
            tape.grads[self.weight] = cut(slope, depth).reshape(weight.shape)
            if self.bias is not None:
                tape.grads[self.bias] = level
            if first:
                return g
            into = (cut(rows, depth).mT @ g).unflatten(1, (channels, *kernel))
            into = into.unflatten(-1, (examples, *size) if per_job else size)
            into = into.permute(0, 1, 4, 2, 3, 5, 6) if per_job else into.unflatten(0, (jobs, examples))
            return put_back(into, self.padding, tape.fused)

        order = (outputs, examples) if per_job else (examples, outputs)
        return tape.record(out.view(jobs, *order, *size), back)

    @staticmethod
    def squares(function: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Squared | None:
        if function not in DIMENSIONS:
            return None
        dimensions = DIMENSIONS[function]
        a, weight, bias, *where, groups = arguments(args, options, DEFAULTS)
        if any(isinstance(part, str) for part in where) or a.dim() != dimensions + 2:
            return None
        sizes = tuple(tuple(part) if isinstance(part, list | tuple) else (part,) * dimensions for part in where)
        return Squared(SquaredConv, (a, weight, bias, sizes, groups), weight)


def ordered(x: Tensor, order: torch.memory_format) -> Tensor:
    """Images in this order; with one channel, where the two orders are the same, the strides say which it is.

    The result of a convolution lies as its input does: without it, all that follows would have to be turned, both ways.
    """
    x = x.contiguous(memory_format=order)
    _, channels, height, width = x.shape
    if channels > 1 or order is not torch.channels_last or x.is_cuda:
        return x
    return x.as_strided(x.shape, (height * width, 1, width, 1))


def layout(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Channels last, except where the weights outweigh a batch: they would have to be turned for every batch.

    On one core, batches of 15, a step through 512 to 512 channels takes 13 ms in place of 41 on pictures of 2 x 2, and
    32 in place of 53 on 4 x 4; 128 to 256 channels on 8 x 8 take the same, 3 to 64 on 32 x 32 twice as long.
    """
    return torch.contiguous_format if weight.numel() > x.numel() else torch.channels_last


def tiles(size: int) -> int:
    """How many tiles of 64 numbers."""
    return -(-size // 64)


def enough(x: Tensor) -> int:
    """Tiles of 64 x 64 that keep a GPU busy through a long sum; tensor cores are content with fewer."""
    return 200 if x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else 100


def _copies(x: Tensor, examples: int) -> Tensor:
    """What a job has, copied for each of its examples: [J, ...] -> [J * B, ...]."""
    return x.unsqueeze(1).expand(-1, examples, *x.shape[1:]).flatten(0, 1)


DIMENSIONS: dict[Any, int] = {F.conv1d: 1, F.conv2d: 2}
DEFAULTS = {"input": None, "weight": None, "bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


class SquaredConv(Function):
    """Per-example gradients [B, out, in * kernel], squared and summed; they exist for one layer at a time."""

    generate_vmap_rule = True

    @staticmethod
    def seen(a: Tensor, weight: Tensor, bias: Tensor | None, where: tuple[Any, ...], groups: int) -> Tensor | None:
        """What the weight is multiplied with, [B, L, in * kernel]; with groups there is not one such input."""
        return _unfolded(a, weight, where).mT if groups == 1 else None

    @staticmethod
    def forward(a: Tensor, weight: Tensor, bias: Tensor | None, where: tuple[Any, ...], groups: int) -> Tensor:
        stride, padding, dilation = where
        return torch.convolution(a, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, weight, bias, ctx.where, ctx.groups = inputs
        ctx.save_for_backward(a, weight)
        ctx.has_bias = bias is not None

    @staticmethod
    @torch.no_grad()  # torch.func.grad would keep every step of this for a second derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        a, weight = ctx.saved_tensors
        seen = _unfolded(a, weight, ctx.where).unflatten(1, (ctx.groups, -1))  # [B, groups, in * kernel, L]
        outs = g.flatten(2).unflatten(1, (ctx.groups, -1))  # [B, groups, out, L]
        squares = (outs @ seen.mT).square().sum(0).view(weight.shape)
        biases = g.flatten(2).sum(2).square().sum(0) if ctx.has_bias else None
        return _into(g, a, weight, ctx.where, ctx.groups), squares, biases, None, None


def _unfolded(a: Tensor, weight: Tensor, where: tuple[Any, ...]) -> Tensor:
    """The patches that the kernel sees, [B, in * kernel, L]; one dimension is two of which one has length 1."""
    if len(where[0]) == 1:
        a, where = a.unsqueeze(2), tuple((one, *part) for one, part in zip((1, 0, 1), where, strict=True))
    stride, padding, dilation = where
    return F.unfold(a, (1, *weight.shape[2:])[-2:], dilation=dilation, padding=padding, stride=stride)


def _into(g: Tensor, a: Tensor, weight: Tensor, where: tuple[Any, ...], groups: int) -> Tensor:
    """The ordinary gradient in the layer's input."""
    stride, padding, dilation = where
    found: Tensor = aten.convolution_backward(
        g, a, weight, None, stride, padding, dilation, False, [0] * len(stride), groups, (True, False, False)
    )[0]
    return found
