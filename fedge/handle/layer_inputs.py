"""Second moments of what the weights of layers are multiplied with, in one forward pass.

A linear layer's gradient is sum_i g_i a_i^T, a convolution's the same over patches: everything that a layer's weight
learns lies in the span of its inputs a. `Inputs` looks at calls of layers with a rule (`fisher_diagonal`) and adds up
a a^T over the real examples.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedge.core import Params
from fedge.handle.fisher_diagonal import rule_of


def sides(params: Params, largest: int) -> dict[str, int]:
    """By weight, the numbers that one input has, and one more; weights with too many are left out."""
    found = {name: leaf[0].numel() + 1 for name, leaf in params.items() if leaf.ndim >= 2}
    return {name: side for name, side in found.items() if side <= largest}


class Moments(TorchFunctionMode):
    """Within it, calls with one of these weights leave sum_i (a_i, 1) (a_i, 1)^T, [in + 1, in + 1], in `found`."""

    def __init__(self, weights: Params, mask: Tensor) -> None:
        super().__init__()
        self.names, self.mask = {id(leaf): name for name, leaf in weights.items()}, mask
        self.found: Params = {}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        called = rule_of(func, args, kwargs)
        if called is not None and (name := self.names.get(id(called.weight))) is not None:
            a = called.rule.seen(*called.inputs)
            if a is not None:
                a = F.pad(a, (0, 1), value=1.0) * self.mask.to(a.dtype).view(-1, 1, 1)
                self.found[name] = a.flatten(0, 1).mT @ a.flatten(0, 1)
        return func(*args, **(kwargs or {}))


def complete(found: Params, params: Params, largest: int) -> Params:
    """The moments of all weights that are small enough; zeros where no layer's input is known."""
    like = next(iter(params.values()))
    known = sides(params, largest).items()
    return {
        name: found[name] if name in found else torch.zeros(side, side, dtype=like.dtype, device=like.device)
        for name, side in known
    }
