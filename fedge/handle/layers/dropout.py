"""Dropout, with the masks of `AddressedDropout`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch.nn.functional as F
from torch import Tensor, nn

from fedge.handle.layer import Call, Layer
from fedge.handle.tape import Tape


@dataclass(frozen=True)
class Dropout(Layer):
    p: float

    @classmethod
    def match(cls, call: Call) -> Self | None:
        if call.target is nn.Dropout:
            return cls(call.name, call.part.p)
        if call.target is not F.dropout or call.args or not set(call.options) <= {"p", "training", "inplace"}:
            return None
        return cls(call.name, call.options.get("p", 0.5) if call.options.get("training", True) else 0.0)

    def one(self, tape: Tape, x: Tensor) -> Tensor:
        tape.dropouts += 1
        if self.p == 0:
            return x
        if self.p == 1:
            return tape.record(x * 0, lambda g: g * 0)
        scale = tape.keep(x, self.p).to(x.dtype) / (1 - self.p)
        return tape.record(x * scale, lambda g: g * scale)

    many = one
