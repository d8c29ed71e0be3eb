"""The maximum of each window, windows side by side."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedge.handle.layer import Call, Layer, NotAChain, pair
from fedge.handle.layers.relu import ReLU
from fedge.handle.tape import Many, One

WINDOW = 127  # pixels: places in a window are kept as bytes
SETTINGS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")

aten = torch.ops.aten


@dataclass(frozen=True)
class MaxPool2d(Layer):
    kernel: tuple[int, int]

    @classmethod
    def match(cls, call: Call) -> Self | None:
        if call.target is nn.MaxPool2d:
            return cls.checked(call.name, *operator.attrgetter(*SETTINGS[:-1])(call.part))
        if call.target is F.max_pool2d and (len(call.args) == 1 or "kernel_size" in call.options):
            known = {key: value for key, value in call.options.items() if key in SETTINGS}
            return cls.checked(call.name, *call.args, **known)
        return None

    @classmethod
    def checked(
        cls, name: str, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> Self:  # fmt: skip
        kernel = pair(kernel_size)
        whole = pair(stride or kernel) == kernel and pair(padding) == (0, 0) and pair(dilation) == (1, 1)
        if not whole or ceil_mode or return_indices:
            raise NotAChain(f"'{name}' (max_pool2d) overlaps, is padded or rounds up")
        if kernel[0] * kernel[1] > WINDOW:
            raise NotAChain(f"'{name}' (max_pool2d) has a window of more than {WINDOW} pixels")
        return cls(name, kernel)

    def goes_before(self, layer: Layer) -> bool:
        """max(relu(x)) = relu(max(x)), gradients included: the pool goes first and leaves the ReLU less to do."""
        return isinstance(layer, ReLU)

    def one(self, tape: One, x: Tensor) -> Tensor:
        """Channels last, a tenth of the time."""
        kernel = list(self.kernel)
        x = x.contiguous(memory_format=torch.channels_last)
        out, where = aten.max_pool2d_with_indices(x, kernel)

        def back(g: Tensor) -> Tensor:
            g = g.contiguous(memory_format=torch.channels_last)
            found: Tensor = aten.max_pool2d_with_indices_backward(g, x, kernel, kernel, [0, 0], [1, 1], False, where)
            return found

        return tape.record(out, back)

    def many(self, tape: Many, x: Tensor) -> Tensor:
        (a, b), (height, width) = self.kernel, x.shape[-2:]
        rows, columns = height // a, width // b
        whole = x if (rows * a, columns * b) == (height, width) else x[..., : rows * a, : columns * b]
        windows = whole.unflatten(-2, (rows, a)).unflatten(-1, (columns, b))
        out, where = windows[..., 0, :, 0], torch.zeros((), dtype=torch.int8, device=x.device)
        for place in range(1, a * b):  # the first of equal values wins, as in torch's own pool
            other = windows[..., place // b, :, place % b]
            where = torch.where(other > out, _bytes(128, x.device)[place], where)
            out = torch.maximum(out, other)
        where = tape.stored(where)
        places = _bytes(a * b, x.device).view(a, 1, b)

        def back(g: Tensor) -> Tensor:
            g = tape.stored(g)
            hit = where.unsqueeze(-1).unsqueeze(-3) == places
            spread = torch.where(hit, g.unsqueeze(-1).unsqueeze(-3), 0.0).flatten(-2).flatten(-3, -2)
            left = (0, width - columns * b, 0, height - rows * a)
            return F.pad(spread, left) if any(left) else spread

        return tape.record(torch.as_tensor(out), back)


_CONSTANTS: dict[Any, Tensor] = {}


def _bytes(count: int, device: torch.device) -> Tensor:
    """0, 1, ..., count - 1."""
    key = (count, device)
    if key not in _CONSTANTS:
        _CONSTANTS[key] = torch.arange(count, dtype=torch.int8, device=device)
    return _CONSTANTS[key]
