"""Functions of torch with a written batched form for J clients. A new one is one file here and one line in the table.

Within `Stacked`, and within vmap over clients, these take the place of vmap's own rules. Whatever has none here is left
to vmap, function by function: a model is not slower as a whole because of one part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import _VF
from torch.overrides import TorchFunctionMode

from fedge.handle import attention
from fedge.handle.recurrent import STATES, arguments, by_layer
from fedge.handle.stacked.by_client import attempt, naming
from fedge.handle.stacked.convolution import DIMENSIONS, convolution
from fedge.handle.stacked.embedding import embedding
from fedge.handle.stacked.linear import linear
from fedge.handle.stacked.norms import group_norm, layer_norm
from fedge.handle.stacked.recurrent import CELLS, alone, apart, by_rule, cell, has_rule

RULES: dict[Any, Callable[..., Any]] = {
    F.linear: linear,
    F.embedding: embedding,
    F.group_norm: group_norm,
    F.layer_norm: layer_norm,
}


ON_A_CPU: dict[Any, Callable[..., Any]] = {
    **{func: partial(convolution, func) for func in DIMENSIONS},
    F.scaled_dot_product_attention: attention.product,
}


class Stacked(TorchFunctionMode):
    """Within it, functions with a rule are computed by it.

    `by_client`: convolutions client by client, which is right for a CPU. `layers`: other rules, by torch's function;
    that of multi-head attention is the `core` of `attention.heads`, that of dropout makes its `masks`.
    """

    def __init__(self, by_client: bool = True, layers: Mapping[Any, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.layers = layers or {}
        self.masks = self.layers.get(F.dropout)
        parts = (*STATES, F.multi_head_attention_forward, F.dropout)
        others = {func: rule for func, rule in self.layers.items() if func not in parts}
        self.rules = RULES | (ON_A_CPU if by_client else {}) | others

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func in self.rules:
            found = self.rules[func](*args, **options)
            return attempt(func, args, options) if found is NotImplemented else found
        if func in STATES:
            call = arguments(func, args)
            return by_layer(call, by_rule(func, self.layers.get(func)) if has_rule(func, call) else apart(func))
        if func in CELLS and not options and args[0].dim() == 2:
            return cell(func, args, self.layers.get(CELLS[func]))
        if func is F.multi_head_attention_forward and attention.is_usual(*args, **options):
            with self:  # again: what it is made of has rules too
                return attention.heads(*args, core=self.layers.get(func), **options)
        return attempt(func, args, options)


class Alone(TorchFunctionMode):
    """One client: recurrent layers by the rule for many where that is faster than torch's own; the rest as it is.

    torch has a fused LSTM for a CPU, except in double precision, and no fused GRU. `rules`: functions to call in place
    of torch's. `usual`: so far every function was torch's own.
    """

    def __init__(self, rules: Mapping[Any, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.rules, self.usual = rules or {}, True

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        ours = func is _VF.gru or (func is _VF.lstm and args[0].dtype == torch.float64)
        if ours and args[0].device.type == "cpu" and has_rule(func, call := arguments(func, args)):
            self.usual = False
            return by_layer(call, alone(func))
        if func in self.rules:
            self.usual = False
            return self.rules[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


__all__ = ["RULES", "Alone", "Stacked", "naming"]
