"""z = a W^T + b, on the last dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fedge.handle.layer import Call, Squared, Weighted, arguments
from fedge.handle.tape import Many, One, Tape


class Linear(Weighted):
    @classmethod
    def match(cls, call: Call) -> Self | None:
        return cls.named(call) if call.target is nn.Linear else None

    def one(self, tape: One, x: Tensor) -> Tensor:
        return self._product(tape, x, 0)

    def many(self, tape: Many, x: Tensor) -> Tensor:
        return self._product(tape, tape.turn(x, False), 1)

    def _product(self, tape: Tape, x: Tensor, batch: int) -> Tensor:
        """`batch`: the first dimension that is not the job's."""
        first = tape.is_first()
        shape, flat, (weight, bias) = x.shape, x.flatten(batch, -2), self.values(tape.params)
        out = tape.product(bias.unsqueeze(1) if batch and bias is not None else bias, flat, weight.mT)

        def back(g: Tensor) -> Tensor:
            g = g.flatten(batch, -2)
            tape.grads[self.weight] = g.mT @ flat
            if self.bias is not None:
                tape.grads[self.bias] = g.sum(batch)
            return g if first else (g @ weight).view(shape)

        return tape.record(out.view(*shape[:-1], -1), back)

    @staticmethod
    def squares(function: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Squared | None:
        if function is not F.linear:
            return None
        a, weight, bias = arguments(args, options, {"input": None, "weight": None, "bias": None})
        return Squared(SquaredLinear, (a, weight, bias), weight)


class SquaredLinear(Function):
    """The gradient of example i is g_i a_i^T: the sum of its squares is (g*g)^T (a*a)."""

    generate_vmap_rule = True

    @staticmethod
    def seen(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What the weight is multiplied with, [B, L, in]."""
        return a.flatten(1, -2) if a.dim() > 2 else a.unsqueeze(1)

    @staticmethod
    def forward(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(a, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, weight, bias = inputs
        ctx.save_for_backward(a, weight)
        ctx.has_bias = bias is not None

    @staticmethod
    @torch.no_grad()  # torch.func.grad would keep every step of this for a second derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        a, weight = ctx.saved_tensors
        if g.dim() == 2:
            squares, biases = (g * g).mT @ (a * a), (g * g).sum(0)
        else:  # [B, ..., out]: the positions of one example add up before the square
            example = g.flatten(1, -2).mT @ a.flatten(1, -2)
            squares, biases = (example * example).sum(0), g.flatten(1, -2).sum(1).square().sum(0)
        return g @ weight, squares, biases if ctx.has_bias else None
