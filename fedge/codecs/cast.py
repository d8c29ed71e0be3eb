"""Uploads in a shorter floating type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedge import tree
from fedge.checks import choice
from fedge.core import Codec, Params

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cast(Codec):
    """Every number rounded to bfloat16 (8 bits of precision, the range of fp32) or fp16 (11 bits, up to 65,504).

    Bytes: 2 d.
    """

    dtype: Literal["bf16", "fp16"] = "bf16"

    def __post_init__(self) -> None:
        choice("dtype", self.dtype, TYPES)

    def encode(self, part: Params, key: Tensor) -> Params:
        return tree.map_(lambda leaf: leaf.to(TYPES[self.dtype]), part)

    def decode(self, sent: Params, like: Params) -> Params:
        return tree.map_(lambda leaf, one: leaf.to(one.dtype), sent, like)
