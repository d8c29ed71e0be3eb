"""An example as one vector: nn.Flatten, x.flatten(1), x.view(x.size(0), -1)."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx import Node

from fedge.handle.layer import Call, Layer
from fedge.handle.tape import Many, One


class Flatten(Layer):
    @classmethod
    def match(cls, call: Call) -> Self | None:
        if call.target is nn.Flatten:
            fits = call.part.start_dim == 1 and call.part.end_dim == -1
        elif call.target in (torch.flatten, "flatten"):
            fits = call.args == (1,) or call.options == {"start_dim": 1}
        else:
            fits = call.target in ("view", "reshape") and _is_batch_by_rest(call.args)
        return cls(call.name) if fits else None

    def one(self, tape: One, x: Tensor) -> Tensor:
        shape = x.shape
        return tape.record(x.flatten(1), lambda g: g.view(shape))

    def many(self, tape: Many, x: Tensor) -> Tensor:
        x = tape.turn(x, False)
        shape = x.shape
        return tape.record(x.flatten(2), lambda g: g.view(shape))


def _is_batch_by_rest(shape: tuple[Any, ...]) -> bool:
    """Whether it is (x.size(0), -1)."""
    if len(shape) != 2 or shape[1] != -1 or not isinstance(shape[0], Node):
        return False
    return shape[0].op == "call_method" and shape[0].target == "size" and shape[0].args[1:] == (0,)
