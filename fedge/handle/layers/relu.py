"""max(x, 0)."""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedge.handle.layer import Call, Layer
from fedge.handle.tape import Tape


class ReLU(Layer):
    @classmethod
    def match(cls, call: Call) -> Self | None:
        return cls(call.name) if call.is_any_of(nn.ReLU, F.relu, torch.relu, "relu") else None

    def one(self, tape: Tape, x: Tensor) -> Tensor:
        out = x.relu()
        return tape.record(out, lambda g: torch.ops.aten.threshold_backward(g, out, 0))

    many = one
