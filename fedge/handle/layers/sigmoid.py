"""1 / (1 + exp(-x))."""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedge.handle.layer import Call, Layer
from fedge.handle.tape import Tape


class Sigmoid(Layer):
    @classmethod
    def match(cls, call: Call) -> Self | None:
        return cls(call.name) if call.is_any_of(nn.Sigmoid, F.sigmoid, torch.sigmoid, "sigmoid") else None

    def one(self, tape: Tape, x: Tensor) -> Tensor:
        out = x.sigmoid()
        return tape.record(out, lambda g: g * (out * (1 - out)))

    many = one
