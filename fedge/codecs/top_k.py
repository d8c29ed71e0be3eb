"""The largest numbers alone: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedge import tree
from fedge.core import Codec, Params

VALUES, PLACES = "values", "places"


@dataclass(frozen=True)
class TopK(Codec):
    """The k = max(1, round(share d)) numbers of largest magnitude among all tensors of a part, and where they stand.

    Magnitudes that are equal to half their digits count as equal, and the first of them is sent: in a model with two
    outputs many pairs are equal but for rounding, which must not decide. It is biased: without error feedback
    (`Compressed(..., feedback=True)`) small coordinates would never be heard.

    Bytes: k (b + 4), b bytes per number and 4 per place.
    """

    share: float = 0.01

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise ValueError(
                f"share is {self.share!r}, it must be above 0 and at most 1 (0.01: one number in a hundred)"
            )

    def encode(self, part: Params, key: Tensor) -> Params:
        flat = torch.cat([leaf.flatten() for leaf in part.values()])
        places = _ranks(flat).topk(max(1, round(self.share * tree.size(part)))).indices
        return {VALUES: flat[places], PLACES: places.to(torch.int32)}

    def decode(self, sent: Params, like: Params) -> Params:
        sizes = [leaf.numel() for leaf in like.values()]
        values = sent[VALUES]
        flat = torch.zeros(sum(sizes), dtype=values.dtype, device=values.device)
        flat = flat.scatter(0, sent[PLACES].long(), values)
        pieces = flat.split(sizes)
        return {name: piece.view(leaf.shape) for (name, leaf), piece in zip(like.items(), pieces, strict=True)}


def _ranks(flat: Tensor) -> Tensor:
    """Whole numbers in the order of the magnitudes, no two alike: coarse magnitudes, ties by place, the first ahead."""
    coarse = flat.abs().to(torch.float32 if flat.dtype == torch.float64 else torch.bfloat16).float()
    return (coarse.view(torch.int32).long() << 32) - torch.arange(len(flat), device=flat.device)
