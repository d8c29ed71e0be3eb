"""Low-rank adapters: a trained model is frozen, and small products beside its linear layers are trained and sent.

    z = W a + b + (alpha / rank) U D a        D [rank, in], drawn;  U [out, rank], zero at first

E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedge.models.replace import replace_layers

log = logging.getLogger("fedge")


class Adapted(nn.Linear):
    """A frozen linear layer and its adapter; at first it computes what the layer did."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float | None) -> None:
        like = layer.weight
        super().__init__(
            layer.in_features, layer.out_features, layer.bias is not None, device=like.device, dtype=like.dtype
        )
        self.load_state_dict(layer.state_dict())
        self.requires_grad_(False)
        self.down = nn.Parameter(like.new_empty(rank, layer.in_features))
        self.up = nn.Parameter(like.new_zeros(layer.out_features, rank))
        self.scale = (rank if alpha is None else alpha) / rank
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        self.train(layer.training)

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

    `alpha` is by default the rank. `train` names parts to train as they are, with all that is in them, such as a new
    head ("out"). Attention layers have no `nn.Linear` of their own inside: their projections stay as they are. So do
    layers with tied weights, because an adapter beside one of them would untie them; the log names them.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}, must be at least 1")
    whole = copy.deepcopy(module).requires_grad_(False)
    own = {layer for name in train for layer in _part(whole, name).requires_grad_(True).modules()}
    tied = {name: layer for name, layer in _tied(whole).items() if layer not in own}
    left = own | set(tied.values())
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        found, made = replace_layers(
            whole, lambda layer: Adapted(layer, rank, alpha) if _fits(layer) and layer not in left else None
        )
    if tied:
        log.info("tied weights stay as they are, without adapters: %s", ", ".join(map(repr, tied)))
    if not made:
        raise ValueError(_nothing(tied))
    for part in found.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0  # else evaluation would take the layers' weights and skip the adapters
    return found


def _part(whole: nn.Module, name: str) -> nn.Module:
    try:
        return whole.get_submodule(name)
    except AttributeError:
        known = ", ".join(repr(one) for one, _ in whole.named_children())
        raise ValueError(f"train names '{name}', which is no part of the model: {known}, or a part of these") from None


def _fits(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return type(layer) is nn.Linear and "weight" in layer._parameters


def _tied(whole: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers whose weight or bias another layer has too."""
    owners = Counter(id(one) for part in whole.modules() for one in set(part._parameters.values()) if one is not None)
    layers = ((name, layer) for name, layer in whole.named_modules() if _fits(layer))
    return {name: layer for name, layer in layers if any(owners[id(one)] > 1 for one in layer.parameters())}


def _nothing(tied: Iterable[str]) -> str:
    if names := ", ".join(map(repr, tied)):
        return f"every nn.Linear layer ({names}) has tied weights, which are not adapted: name them in train="
    return "the model has no nn.Linear layer to adapt: train it as it is, or name parts in train="


def merged(module: nn.Module) -> nn.Module:
    """A copy with every adapter added to its layer's weights: a plain model again, all of it trainable.

    One adapted layer with several names is one layer again, and tied weights are tied still.
    """
    found, _ = replace_layers(
        copy.deepcopy(module), lambda layer: layer.merged() if isinstance(layer, Adapted) else None
    )
    return found.requires_grad_(True)
