"""A forward pass through a chain that remembers how to go back: what the rules for one job and for many share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedge.core import Params
from fedge.handle.chain import Layer

Back = Callable[[Tensor], Tensor]


class Tape:
    """A method a kind of layer; each leaves its way back in `steps`, and `grads` fills on that way."""

    def __init__(self, params: Params, key: Tensor) -> None:
        self.params, self.key = params, key
        self.steps: list[Back] = []
        self.grads: Params = {}
        self.dropouts, self.trained = 0, False

    def forward(self, layers: list[Layer], x: Tensor) -> Tensor:
        for layer in layers:
            x = getattr(self, layer.kind)(layer, x)
        return x

    def backward(self, g: Tensor) -> Params:
        for back in reversed(self.steps):
            g = back(g)
        return self.grads

    def noted(self, out: Tensor, back: Back) -> Tensor:
        """What a layer puts out, once the way back is noted."""
        self.steps.append(back)
        return out

    def is_first(self) -> bool:
        """Whether no layer before this one wants a gradient; the way back then ends here."""
        first, self.trained = not self.trained, True
        if first:
            self.steps.clear()
        return first

    def relu(self, layer: Layer, x: Tensor) -> Tensor:
        out = x.relu()
        return self.noted(out, lambda g: torch.ops.aten.threshold_backward(g, out, 0))

    def tanh(self, layer: Layer, x: Tensor) -> Tensor:
        out = x.tanh()
        return self.noted(out, lambda g: g * (1 - out * out))

    def sigmoid(self, layer: Layer, x: Tensor) -> Tensor:
        out = x.sigmoid()
        return self.noted(out, lambda g: g * (out * (1 - out)))

    def dropout(self, layer: Layer, x: Tensor) -> Tensor:
        self.dropouts += 1
        p = layer["p"]
        if p == 0:
            return x
        if p == 1:
            return self.noted(x * 0, lambda g: g * 0)
        scale = self.keep(x, p).to(x.dtype) / (1 - p)
        return self.noted(x * scale, lambda g: g * scale)

    def keep(self, x: Tensor, p: float) -> Tensor:
        """The mask of the present dropout, in the shape of x."""
        raise NotImplementedError
