"""A convolution of a chain in C, for one client on one thread of a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedge.engine.recording.c_conv import backward, convolved, suits
from fedge.handle.layer import Call, Layer
from fedge.handle.layers.conv2d import Conv2d, ordered
from fedge.handle.tape import Many, One


@dataclass(frozen=True)
class DirectConv(Layer):
    """By a program for its very sizes where that suits, else as the layer itself."""

    conv: Conv2d

    @classmethod
    def match(cls, call: Call) -> Self | None:
        return None  # it is made of a layer

    def one(self, tape: One, x: Tensor) -> Tensor:
        weight, bias = self.conv.values(tape.params)
        of = suits(x, weight, 1, self.conv.padding, tape.trained, bias)
        if of is None:
            return self.conv.one(tape, x)
        first, x = tape.is_first(), ordered(x, torch.channels_last)

        def back(g: Tensor) -> Tensor:
            slope, level, *into = backward(g, x, weight, [*of.numbers, int(bias is not None)])
            tape.grads[self.conv.weight] = slope
            if self.conv.bias is not None:
                tape.grads[self.conv.bias] = level
            return g if first else into[0]

        return tape.record(convolved(x, weight, bias, of), back)

    def many(self, tape: Many, x: Tensor) -> Tensor:
        return self.conv.many(tape, x)
