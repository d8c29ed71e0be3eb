"""Low-rank adapters: a trained model is frozen, and small products beside its linear layers are trained and sent.

    z = W a + b + (alpha / rank) U D a        D [rank, in], drawn;  U [out, rank], zero at first

E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Adapted(nn.Linear):
    """A frozen linear layer and its adapter; at first it computes what the layer did."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float) -> None:
        like = layer.weight
        super().__init__(
            layer.in_features, layer.out_features, layer.bias is not None, device=like.device, dtype=like.dtype
        )
        self.load_state_dict(layer.state_dict())
        self.requires_grad_(False)
        self.down = nn.Parameter(like.new_empty(rank, layer.in_features))
        self.up = nn.Parameter(like.new_zeros(layer.out_features, rank))
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, a: Tensor) -> Tensor:
        return super().forward(a) + self.scale * F.linear(F.linear(a, self.down), self.up)

    def merged(self) -> nn.Linear:
        """A plain layer that computes the same."""
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None).to(self.weight)
        with torch.no_grad():
            layer.weight.copy_(self.weight + self.scale * self.up @ self.down)
            if self.bias is not None:
                layer.bias.copy_(self.bias)
        return layer


def lora(
    module: nn.Module, rank: int = 4, alpha: float | None = None, train: Sequence[str] = (), seed: int | None = None
) -> nn.Module:
    """A copy with everything frozen, and an adapter of this rank beside every `nn.Linear`; only these are trained.

    `alpha` is by default the rank. `train` names parts to train as they are, such as a new head ("out"). Attention
    layers have no `nn.Linear` of their own inside: their projections stay as they are.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}, must be at least 1")
    whole = nn.ModuleDict({"all": copy.deepcopy(module).requires_grad_(False)})
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        count = _adapt(whole, rank, float(rank if alpha is None else alpha), {f"all.{name}" for name in train})
    found: nn.Module = whole["all"]
    for name in train:
        found.get_submodule(name).requires_grad_(True)
    if not count:
        raise ValueError("the model has no nn.Linear layer to adapt: train it as it is, or name parts in train=")
    return found


def _adapt(whole: nn.Module, rank: int, alpha: float, kept: set[str]) -> int:
    count = 0
    for name, part in list(whole.named_modules()):
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0  # else evaluation would take the layers' weights and skip the adapters
        for child, layer in part.named_children():
            if type(layer) is nn.Linear and f"{name}.{child}" not in kept:
                setattr(part, child, Adapted(layer, rank, alpha))
                count += 1
    return count


def merged(module: nn.Module) -> nn.Module:
    """A copy with every adapter added to its layer's weights: a plain model again, all of it trainable."""
    whole = nn.ModuleDict({"all": copy.deepcopy(module)})
    for part in list(whole.modules()):
        for child, layer in part.named_children():
            if isinstance(layer, Adapted):
                setattr(part, child, layer.merged())
    found: Any = whole["all"].requires_grad_(True)
    result: nn.Module = found
    return result
