"""Layers of many clients that are C programs on a CPU: LSTM, attention, layer norms, and dropout beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fedge.engine.recording import c_attention, c_dropout, c_layer_norm, c_lstm
from fedge.engine.recording.c_library import check, is_made
from fedge.handle.module import parameters

_ATTENTION = {
    F.layer_norm: c_layer_norm.layer_norm,
    F.multi_head_attention_forward: c_attention.to_itself,
    F.scaled_dot_product_attention: c_attention.product_attention,
}


def stacked_in_c(model: nn.Module) -> dict[Any, Callable[..., Any]]:
    """By torch's function what to call in its place; nothing in double precision or without a compiler."""
    lstm = c_lstm.layers() if _has(model, nn.LSTM, nn.LSTMCell) else {}
    norms = _has(model, nn.LayerNorm, nn.MultiheadAttention) and is_made(check, "attention and layer norms")
    found = lstm | (_ATTENTION if norms else {})
    return found | {F.dropout: c_dropout.scaled_mask} if found else {}


def _has(model: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether it has such layers, and weights of single precision."""
    single = any(leaf.dtype == torch.float32 for leaf in parameters(model).values())
    return single and any(isinstance(layer, kinds) for layer in model.modules())
