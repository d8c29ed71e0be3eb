"""Linear layers with many weights, of one client on one thread, in C (`linear_source` has the program)."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fedge.core import Params
from fedge.engine.recording.c_library import NoCompiler, load
from fedge.engine.recording.linear_source import source
from fedge.engine.recording.suited import is_one_per_output, is_transformed
from fedge.handle.layer import Call, Layer, arguments
from fedge.handle.layers.linear import Linear
from fedge.handle.stacked.operator import operator
from fedge.handle.tape import Many, One

log = logging.getLogger("fedge")

MANY = 1 << 16  # weights: with fewer, a call takes as long as the product
TYPES = (torch.float32, torch.float64)


@lru_cache(maxsize=2)
def program(dtype: torch.dtype) -> Any:
    """Raises NoCompiler where it cannot be made."""
    found = load(source(dtype))[0]
    found.argtypes = [ctypes.c_int, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return found


@lru_cache(maxsize=2)
def is_there(dtype: torch.dtype) -> bool:
    try:
        program(dtype)
    except NoCompiler as reason:
        log.info("linear layers are computed by torch's operations: %s", reason)
        return False
    return True


def _call(what: int, x: Tensor, weight: Tensor, tensors: list[Tensor | None]) -> None:
    pointers = (ctypes.c_void_p * len(tensors))(*[None if one is None else one.data_ptr() for one in tensors])
    program(x.dtype)(what, x.shape[0], x.shape[1], weight.shape[0], pointers)


def _forward(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """x [B, I], weight [O, I], bias [O] or [0] -> [B, O]."""
    x, weight, (out,) = x.contiguous(), weight.contiguous(), _out(x, weight, bias)
    _call(0, x, weight, [x, weight, bias.contiguous() if bias.numel() else None, out])
    return [out]


def _out(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    return [x.new_empty(x.shape[0], weight.shape[0])]


def _backward(g: Tensor, x: Tensor, weight: Tensor, numbers: list[int]) -> list[Tensor]:
    """The gradients in weight, bias and, if the number is not zero, in x."""
    g, x, weight = g.contiguous(), x.contiguous(), weight.contiguous()
    slope, level, *into = found = _like(g, x, weight, numbers)
    _call(1, x, weight, [g, x, weight, into[0] if into else None, slope, level])
    return found


def _like(g: Tensor, x: Tensor, weight: Tensor, numbers: list[int]) -> list[Tensor]:
    found = [weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])]
    return found + ([x.new_empty(x.shape)] if numbers[0] else [])


forward = operator("linear_in_c", _forward, 3, like=_out)
backward = operator("linear_in_c_backward", _backward, 3, like=_like, numbers="int[]")


def suits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether this call is done in C; what torch would refuse or stretch is left to it."""
    usual = x.dim() > 1 and x.dtype == weight.dtype and x.dtype in TYPES and x.device.type == "cpu" and x.numel() > 0
    fits = weight.dim() == 2 and x.shape[-1] == weight.shape[1] and is_one_per_output(bias, weight)
    return usual and fits and weight.numel() >= MANY and torch.get_num_threads() == 1 and is_there(x.dtype)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = forward(x, weight, weight.new_empty(0) if bias is None else bias)[0]
    return found


@dataclass(frozen=True)
class DirectLinear(Layer):
    """In C where that suits, else as the layer itself."""

    linear: Linear

    @classmethod
    def match(cls, call: Call) -> Self | None:
        return None  # it is made of a layer

    def one(self, tape: One, x: Tensor) -> Tensor:
        weight, bias = self.linear.values(tape.params)
        if not suits(x, weight, bias):
            return self.linear.one(tape, x)
        first, shape, flat = tape.is_first(), x.shape, x.flatten(0, -2)

        def back(g: Tensor) -> Tensor:
            slope, level, *into = backward(g.flatten(0, -2), flat, weight, [int(not first)])
            tape.grads[self.linear.weight] = slope
            if self.linear.bias is not None:
                tape.grads[self.linear.bias] = level
            return g if first else into[0].view(shape)

        return tape.record(_product(flat, weight, bias).view(*shape[:-1], -1), back)

    def many(self, tape: Many, x: Tensor) -> Tensor:
        return self.linear.many(tape, x)


def direct(layers: list[Layer], params: Params) -> list[Layer]:
    """The chain with its large linear layers in C."""
    return [
        DirectLinear(layer.name, layer) if isinstance(layer, Linear) and params[layer.weight].numel() >= MANY else layer
        for layer in layers
    ]


class Product(Function):
    """For autograd; x [B, I]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (g,), (x, weight) = grads, ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted
            return g @ weight, g.mT @ x, g.sum(0) if ctx.has_bias else None
        slope, level, *into = backward(g, x, weight, [int(ctx.needs_input_grad[0])])
        return into[0] if into else None, slope, level if ctx.has_bias else None


def linear(*args: Any, **options: Any) -> Tensor:
    """As torch's; where it suits, in C."""
    x, weight, bias = arguments(args, options, {"input": None, "weight": None, "bias": None})
    if is_transformed() or not suits(x, weight, bias):
        return F.linear(x, weight, bias)
    found: Tensor = Product.apply(x.flatten(0, -2), weight, bias)  # type: ignore[no-untyped-call]
    return found.view(*x.shape[:-1], -1)


def rules(params: Params) -> dict[Any, Callable[..., Any]]:
    """For models that are not chains: what to call in place of torch's function, if there are enough weights."""
    return {F.linear: linear} if any(leaf.dim() == 2 and leaf.numel() >= MANY for leaf in params.values()) else {}
