"""A convolution and the max pool behind it as one layer of a chain, for one client on one thread of a CPU."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fedge.engine.recording.c_conv import ROOM, convolved, suits
from fedge.engine.recording.c_library import NoCompiler
from fedge.engine.recording.c_pooled import Geometry, pooled, program, slopes
from fedge.engine.recording.conv_layer import DirectConv
from fedge.handle.layer import Call, Layer
from fedge.handle.layers.conv2d import Conv2d, layout, ordered
from fedge.handle.layers.max_pool2d import MaxPool2d
from fedge.handle.tape import Many, One

log = logging.getLogger("fedge")

VECTORS = 160  # of a patch at most: with more, its program is long, and weights outweigh a batch
_REFUSED: set[Geometry] = set()


@dataclass(frozen=True)
class PooledConv(Layer):
    """Forwards a convolution, backwards only through the pixels that the pool let through."""

    conv: Conv2d
    pool: MaxPool2d

    @classmethod
    def match(cls, call: Call) -> Self | None:
        return None  # it is made of two layers

    def one(self, tape: One, x: Tensor) -> Tensor:
        weight, bias = self.conv.values(tape.params)
        of = self._geometry(x, weight)
        if of is None:
            return self.pool.one(tape, self.conv.one(tape, x))
        first, x = tape.is_first(), ordered(x, torch.channels_last)
        out, at = pooled(self._convolved(x, weight, bias), of.numbers)

        def back(g: Tensor) -> Tensor:
            slope, level, *into = slopes(g, at, x, weight, [*of.numbers, int(not first)])
            tape.grads[self.conv.weight] = slope
            if self.conv.bias is not None:
                tape.grads[self.conv.bias] = level
            return g if first else into[0]

        return tape.record(out, back)

    def _convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        direct = suits(x, weight, 1, self.conv.padding, False, bias)
        if direct is not None:
            return convolved(x, weight, bias, direct)
        return F.conv2d(x, weight, bias, padding=list(self.conv.padding))

    def many(self, tape: Many, x: Tensor) -> Tensor:
        return self.pool.many(tape, self.conv.many(tape, x))

    def _geometry(self, x: Tensor, weight: Tensor) -> Geometry | None:
        """The sizes of a program for this call; None where there is none, or where the layers apart are better."""
        usual = x.dim() == 4 and x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)
        if not usual or torch.get_num_threads() > 1 or layout(x, weight) is not torch.channels_last:
            return None
        (outputs, channels, kh, kw), (height, width) = weight.shape, x.shape[2:]
        of = Geometry(channels, outputs, height, width, (kh, kw), self.conv.padding, self.pool.kernel, x.dtype)
        fits = x.shape[1] == channels and min(of.windows) > 0 and of.patch <= VECTORS and of.room <= ROOM
        return of if fits and _made(of) else None


def _made(of: Geometry) -> bool:
    """Whether there is a program for these sizes."""
    if of in _REFUSED:
        return False
    try:
        program(of)
    except NoCompiler as reason:
        log.info("convolutions are computed by torch's operations: %s", reason)
        _REFUSED.add(of)
        return False
    return True


def joined(layers: list[Layer]) -> list[Layer]:
    """The chain with convolutions in C, and those right before a pool as one layer with it."""
    found: list[Any] = []
    for layer in layers:
        if isinstance(layer, MaxPool2d) and found and isinstance(found[-1], DirectConv):
            found[-1] = PooledConv(found[-1].name, found[-1].conv, layer)
        else:
            found.append(DirectConv(layer.name, layer) if isinstance(layer, Conv2d) else layer)
    return found
