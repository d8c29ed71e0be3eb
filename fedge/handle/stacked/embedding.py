"""Embeddings: the tables of all clients are one long table, and each client's numbers start where its own begins."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedge.handle.layer import arguments
from fedge.handle.stacked.rule import stacked

NAMES = {
    "input": None, "weight": None, "padding_idx": None, "max_norm": None, "norm_type": 2.0,
    "scale_grad_by_freq": False, "sparse": False,
}  # fmt: skip


def embedding(*args: Any, **options: Any) -> Any:
    numbers, weight, padding, most, _, by_frequency, _ = arguments(args, options, NAMES)
    if most is not None or by_frequency:
        return NotImplemented

    def many(numbers: Tensor, weight: Tensor) -> Tensor:
        """numbers [J, ...], weight [J, V, E]."""
        jobs, words, _ = weight.shape
        start = torch.arange(0, jobs * words, words, device=numbers.device).view(-1, *[1] * (numbers.dim() - 1))
        out = F.embedding(numbers + start, weight.flatten(0, 1))
        if padding is None:
            return out
        return torch.where((numbers == padding % words).unsqueeze(-1), out.detach(), out)

    return stacked(lambda numbers, weight: F.embedding(numbers, weight, padding), many, numbers, weight)
