"""The hyperbolic tangent."""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedge.handle.layer import Call, Layer
from fedge.handle.tape import Tape


class Tanh(Layer):
    @classmethod
    def match(cls, call: Call) -> Self | None:
        return cls(call.name) if call.is_any_of(nn.Tanh, F.tanh, torch.tanh, "tanh") else None

    def one(self, tape: Tape, x: Tensor) -> Tensor:
        out = x.tanh()
        return tape.record(out, lambda g: g * (1 - out * out))

    many = one
