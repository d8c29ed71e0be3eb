"""Stochastic quantisation: Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization, NIPS 2017."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedge import keys
from fedge.core import Codec, Params

BITS = (2, 4, 8)
CODES, SCALE = "codes", "scale"


@dataclass(frozen=True)
class Quantise(Codec):
    """Every number x of a tensor with m = max |x| as one of the 2 s + 1 multiples of m / s, s = 2^(bits-1) - 1.

        code = floor(s x / m + u),  u uniform in [0, 1)        E[m code / s] = x

    The rounding is random and addressed, so the mean over many uploads is unbiased. 8 / bits codes share a byte.

    Bytes: per tensor of n numbers ceil(n bits / 8) and its scale.
    """

    bits: int = 8

    def __post_init__(self) -> None:
        if self.bits not in BITS or isinstance(self.bits, bool):
            raise ValueError(f"bits is {self.bits!r}, it must be one of {list(BITS)}")

    @property
    def levels(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def encode(self, part: Params, key: Tensor) -> Params:
        sent: Params = {}
        for place, (name, given) in enumerate(part.items()):
            leaf = given if given.dtype == torch.float64 else given.float()  # half precision has too few digits
            scale = leaf.abs().amax()
            unit = torch.where(scale > 0, scale, 1.0)
            draw = keys.uniform(keys.fold_tensor(key, place).to(leaf.device), leaf)
            codes = torch.floor(leaf / unit * self.levels + draw).clamp(-self.levels, self.levels)
            sent[f"{name}.{CODES}"] = self._packed((codes + self.levels).nan_to_num(0.0).to(torch.uint8).flatten())
            sent[f"{name}.{SCALE}"] = scale
        return sent

    def decode(self, sent: Params, like: Params) -> Params:
        found: Params = {}
        for name, leaf in like.items():
            codes = self._unpacked(sent[f"{name}.{CODES}"])[: leaf.numel()].view(leaf.shape)
            signed = codes.to(sent[f"{name}.{SCALE}"].dtype) - self.levels
            found[name] = (signed * (sent[f"{name}.{SCALE}"] / self.levels)).to(leaf.dtype)
        return found

    def _packed(self, codes: Tensor) -> Tensor:
        """Several codes per byte, the first in its lowest bits."""
        together = 8 // self.bits
        if together == 1:
            return codes
        padded = torch.nn.functional.pad(codes, (0, -len(codes) % together)).view(-1, together)
        shifted = [padded[:, i] << (self.bits * i) for i in range(together)]
        total = shifted[0]
        for one in shifted[1:]:
            total = total | one
        return total

    def _unpacked(self, packed: Tensor) -> Tensor:
        together, mask = 8 // self.bits, 2**self.bits - 1
        return torch.stack([(packed >> (self.bits * i)) & mask for i in range(together)], dim=-1).flatten()
