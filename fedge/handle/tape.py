"""The record of a forward pass through a chain, from which the backward pass is run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from fedge.core import Params
from fedge.keys import fold_tensor, keep_mask

Back = Callable[[Tensor], Tensor]

TERMS = 128  # examples: compiled, 100 terms cost twice the time of 15 and 600 eight times


class Tape(ABC):
    """Layers record their backward steps in `steps`; these fill `grads`."""

    def __init__(self, params: Params, key: Tensor) -> None:
        self.params, self.key = params, key
        self.steps: list[Back] = []
        self.grads: Params = {}
        self.dropouts, self.trained = 0, False

    def record(self, out: Tensor, back: Back) -> Tensor:
        """Records how to get from the gradient in `out` to that in the layer's input; returns `out`."""
        self.steps.append(back)
        return out

    def is_first(self) -> bool:
        """Whether no layer before this one has parameters; the backward pass then ends here."""
        first, self.trained = not self.trained, True
        if first:
            self.steps.clear()
        return first

    def backward(self, g: Tensor) -> Params:
        for back in reversed(self.steps):
            g = back(g)
        return self.grads

    @abstractmethod
    def keep(self, x: Tensor, p: float) -> Tensor:
        """The mask of the present dropout, in the shape of x."""

    @abstractmethod
    def product(self, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        """a @ b + bias"""


class One(Tape):
    """One job on a CPU. Images are [B, C, H, W], mostly channels last in memory; vectors are [B, F].

    One client's batch is too little for several threads; what counts are torch's own kernels.
    """

    def keep(self, x: Tensor, p: float) -> Tensor:
        return keep_mask(fold_tensor(self.key, self.dropouts), x.shape, p, x.device)

    def product(self, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        return a @ b if bias is None else torch.addmm(bias, a, b)


class Many(Tape):
    """J jobs at once: every layer is a batched product or acts on each number by itself. Vectors are [J, B, F].

    Images are [J, B, C, H, W] or, with `channels_first`, [J, C, B, H, W]; a convolution says which it wants. `fused`
    says that a compiler joins operations on single numbers: they are then written out one by one.
    """

    def __init__(self, params: Params, key: Tensor, fused: bool) -> None:
        super().__init__(params, key)
        self.fused, self.channels_first = fused, False

    def turn(self, x: Tensor, channels_first: bool) -> Tensor:
        """Images in the wanted order, as a view."""
        if channels_first == self.channels_first:
            return x
        self.channels_first = channels_first
        return self.record(x.transpose(1, 2), lambda g: g.transpose(1, 2))

    def keep(self, x: Tensor, p: float) -> Tensor:
        """The mask of one job is addressed by the element's place in [B, C, H, W], in whichever order images are."""
        shape = x.transpose(1, 2).shape[1:] if self.channels_first else x.shape[1:]
        key = fold_tensor(self.key, self.dropouts).view(-1, *[1] * len(shape))
        found = keep_mask(key, shape, p, x.device)
        return found.transpose(1, 2) if self.channels_first else found

    def stored(self, x: Tensor) -> Tensor:
        """Written to memory once: a compiler would compute it anew for every pixel of a window."""
        return x.as_strided(x.shape, x.stride()) if self.fused else x

    def sum_over_examples(self, parts: Tensor) -> Tensor:
        """[J, B, ...] -> [J, ...]; term by term it is one pass for a compiler.

        For a large batch it is not written out: a compiler would need minutes for so many terms.
        """
        if self.fused and parts.shape[1] <= TERMS:
            return self.stored(sum(parts.unbind(1)[1:], parts[:, 0]))
        return self.stored(parts.sum(1))

    def product(self, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        if bias is None:
            return a @ b
        return a @ b + bias if self.fused else torch.baddbmm(bias, a, b)
