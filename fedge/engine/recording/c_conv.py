"""Convolutions of one client's small images in C (`conv_source` has the program), on one thread.

torch's kernels come to the same speed on large images. On small ones they take as long again for turning weights and
for what lies around a kernel, and backwards through a stride they take twice as long.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fedge.engine.recording.c_library import is_made, load
from fedge.engine.recording.conv_source import Geometry
from fedge.engine.recording.suited import is_one_per_output, is_transformed
from fedge.handle import turned
from fedge.handle.layer import arguments, pair
from fedge.handle.layers.conv2d import ordered
from fedge.handle.stacked.convolution import NAMES
from fedge.handle.stacked.operator import operator

LAST = torch.channels_last
HEAVY = 1 << 16  # weights: more do not stay in a core's cache, and torch's kernels know what to do about it
ROOM = 1 << 21  # numbers that a thread keeps at most for one convolution


@lru_cache(maxsize=256)
def program(of: Geometry) -> Any:
    """Raises NoCompiler where it cannot be made."""
    found = load(of.source())[0]
    found.restype = None
    return found


@lru_cache(maxsize=256)
def geometry(numbers: tuple[int, ...], dtype: torch.dtype) -> Geometry:
    c, o, h, w, kh, kw, down, right, top, left, into = numbers
    return Geometry(c, o, h, w, (kh, kw), (down, right), (top, left), bool(into), dtype)


def _call(of: Geometry, what: int, examples: int, tensors: list[Tensor | None]) -> None:
    pointers = (ctypes.c_void_p * len(tensors))(*[None if one is None else one.data_ptr() for one in tensors])
    program(of)(what, ctypes.c_int64(examples), pointers)


def _forward(x: Tensor, weight: Tensor, bias: Tensor, numbers: list[int]) -> list[Tensor]:
    """x [B, C, H, W], weight [O, C, kh, kw], bias [O] or [0] -> [B, O, H', W']."""
    (out,) = found = _out(x, weight, bias, numbers)
    shift = bias.contiguous() if bias.shape[0] else None
    _call(geometry(tuple(numbers), x.dtype), 0, x.shape[0], [_pixels(x), weight.contiguous(), shift, out])
    return found


def _out(x: Tensor, weight: Tensor, bias: Tensor, numbers: list[int]) -> list[Tensor]:
    shape = (x.shape[0], weight.shape[0], *geometry(tuple(numbers), x.dtype).size)
    return [torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=LAST)]


def _backward(g: Tensor, x: Tensor, weight: Tensor, numbers: list[int]) -> list[Tensor]:
    """The gradients in weight, bias (if the last number is not zero, else [0]) and, if the one before is not, in x."""
    slope, level, *into = found = _like(g, x, weight, numbers)
    given = [
        _pixels(g),
        _pixels(x),
        weight.contiguous(),
        into[0] if into else None,
        slope,
        level if numbers[-1] else None,
    ]
    _call(geometry(tuple(numbers[:-1]), x.dtype), 1, x.shape[0], given)
    return found


def _like(g: Tensor, x: Tensor, weight: Tensor, numbers: list[int]) -> list[Tensor]:
    found = [weight.new_empty(weight.shape), weight.new_empty(weight.shape[0] if numbers[-1] else 0)]
    return found + ([torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=LAST)] if numbers[-2] else [])


def _pixels(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=LAST)


forward = operator("conv_in_c", _forward, 3, like=_out, numbers="int[]")
backward = operator("conv_in_c_backward", _backward, 3, like=_like, numbers="int[]")


def suits(
    x: Tensor, weight: Tensor, stride: Any, padding: Any, into: bool, bias: Tensor | None = None
) -> Geometry | None:
    """The sizes of a program for this call; None where torch's kernels are better, or there is none."""
    usual = x.dim() == 4 and x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64) and x.shape[0] > 0
    if not usual or torch.get_num_threads() > 1 or x.device.type != "cpu" or isinstance(padding, str):
        return None
    if weight.dim() != 4 or not is_one_per_output(bias, weight):
        return None
    (outputs, channels, kh, kw), (height, width) = weight.shape, x.shape[2:]
    of = Geometry(channels, outputs, height, width, (kh, kw), pair(stride), pair(padding), into, x.dtype)
    fits = x.shape[1] == channels and min(of.size) > 0 and of.fills(outputs) and (of.fills(channels) or not into)
    small = fits and weight.numel() <= HEAVY and of.room <= ROOM
    return of if small and is_made(partial(program, of), "convolutions") else None


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, of: Geometry) -> Tensor:
    """The output, of images in the order of `ordered`."""
    found: Tensor = forward(x, weight, weight.new_empty(0) if bias is None else bias, of.numbers)[0]
    return found


class Conv(Function):
    """For autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, of: Geometry) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.of, ctx.has_bias = of, bias is not None
        return convolved(x, weight, bias, of)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (g,), (x, weight), of = grads, ctx.saved_tensors, ctx.of
        if torch.is_grad_enabled():  # a second derivative is wanted
            wanted = [of.into, True, ctx.has_bias]
            found = torch.ops.aten.convolution_backward(
                g, x, weight, [of.outputs], of.stride, of.padding, [1, 1], False, [0, 0], 1, wanted
            )
            return *found, None
        slope, level, *into = backward(g, x, weight, [*of.numbers, int(ctx.has_bias)])
        return into[0] if into else None, slope, level if ctx.has_bias else None, None


def conv2d(*args: Any, **options: Any) -> Tensor:
    """As torch's; where it suits, in C."""
    x, weight, bias, stride, padding, dilation, groups = arguments(args, options, NAMES)
    plain = groups == 1 and dilation in (1, (1, 1), [1, 1])
    plain = plain and not is_transformed()
    of = suits(x, weight, stride, padding, x.requires_grad, bias) if plain else None
    if of is None:
        return turned.conv2d(*args, **options)
    found: Tensor = Conv.apply(ordered(x, LAST), weight, bias, of)  # type: ignore[no-untyped-call]
    return found
