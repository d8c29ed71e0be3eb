"""Attention written out in operations that have addressed dropout and a batched form.

    out = dropout(softmax(q k^T / sqrt(d) + mask)) v

(Vaswani et al., NeurIPS 2017.) torch's own functions draw the dropout mask inside, where it cannot be addressed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_PLAIN = {
    "query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None,
    "enable_gqa": False,
}  # fmt: skip
Core = Callable[[Tensor, int, Tensor | None, Tensor | None, bool], Tensor]  # as `to_itself`
_HEADS = inspect.signature(F.multi_head_attention_forward)


def plain(*args: Any, **options: Any) -> Tensor:
    """F.scaled_dot_product_attention."""
    given = _PLAIN | dict(zip(_PLAIN, args, strict=False)) | options
    if given["enable_gqa"]:
        raise ValueError("attention with enable_gqa=True and dropout has no addressed form: set its dropout to 0")
    q, k, mask = given["query"], given["key"], given["attn_mask"]
    if given["is_causal"]:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    scale = 1 / math.sqrt(q.shape[-1]) if given["scale"] is None else given["scale"]
    return attended(q, k, given["value"], _added(mask, q, keep=True), scale, given["dropout_p"])[0]


def usual(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float] | None:
    """Queries, keys, values, mask and scale of F.scaled_dot_product_attention; None if it is one of its rarer forms."""
    given = _PLAIN | dict(zip(_PLAIN, args, strict=False)) | options
    q, k, v, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    alike = q.dim() == k.dim() == v.dim() == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2] and k.shape == v.shape
    if not alike or q.shape[-1] != k.shape[-1] or given["dropout_p"] or given["enable_gqa"]:
        return None
    if given["is_causal"]:
        if mask is not None:
            return None
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    scale = 1 / math.sqrt(q.shape[-1]) if given["scale"] is None else given["scale"]
    return q, k, v, _added(mask, q, keep=True), scale


def product(*args: Any, **options: Any) -> Any:
    """F.scaled_dot_product_attention in its usual form: torch's own has no batched form on a CPU."""
    given = usual(*args, **options)
    return NotImplemented if given is None else attended(*given, 0.0)[0]


def to_itself(x: Tensor, heads: int, mask: Tensor | None, drop: Tensor | None, first: bool) -> Tensor:
    """Queries, keys and values side by side, x [..., B, T, 3 E], to [..., B, T, E]; time may come `first`, before B.

    `mask` is added to the scores, and `drop` is what dropout multiplies the weights with.
    """
    x = x.transpose(-2, -3) if first else x
    q, k, v = (part.transpose(-2, -3) for part in x.unflatten(-1, (3, heads, -1)).unbind(-3))
    weights = attended(q, k, v, mask, 1 / math.sqrt(q.shape[-1]), 0.0)[1]
    out: Tensor = ((weights if drop is None else weights * drop) @ v).transpose(-2, -3).flatten(-2)
    return out.transpose(-2, -3) if first else out


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, p: float) -> tuple[Tensor, Tensor]:
    """What every query gets, [..., T, d], and the weights, [..., T, S]."""
    scores = (q * scale) @ k.mT
    weights = F.softmax(scores if mask is None else scores + mask, -1)
    weights = F.dropout(weights, p) if p else weights
    return weights @ v, weights


def _added(mask: Tensor | None, like: Tensor, keep: bool) -> Tensor | None:
    """A mask of truth values as numbers to add: where it is not `keep`, minus infinity."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    out = mask.logical_not() if keep else mask
    return torch.where(out, -math.inf, torch.zeros((), dtype=like.dtype, device=like.device))


def is_usual(*args: Any, **options: Any) -> bool:
    """Whether `heads` computes this call: batched, without further keys."""
    given = _HEADS.bind(*args, **options).arguments
    further = ("bias_k", "bias_v", "static_k", "static_v")
    return given["query"].dim() == 3 and not given["add_zero_attn"] and all(given.get(name) is None for name in further)


def draws(*args: Any, **options: Any) -> bool:
    """Whether there is dropout in this call; refused where `heads` does not compute it."""
    given = _HEADS.bind(*args, **options).arguments
    if not given["dropout_p"] or not given.get("training", True):
        return False
    if not is_usual(*args, **options):
        raise ValueError(
            f"attention has dropout={given['dropout_p']} with bias_k, bias_v, add_zero_attn or inputs without a batch, "
            "where its masks have no address: set its dropout to 0, and use nn.Dropout layers"
        )
    return True


def heads(*args: Any, core: Core | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:
    """F.multi_head_attention_forward: queries [T, B, E], keys and values [S, B, ...].

    `core` computes the attention of a sequence to itself where nobody asks for the weights.
    """
    bound = _HEADS.bind(*args, **options)
    bound.apply_defaults()
    given = bound.arguments
    query, count = given["query"], given["num_heads"]
    times, batch, _ = query.shape
    if core is not None and _is_to_itself(given):
        return _by_core(core, given), None

    def parted(x: Tensor) -> Tensor:
        found: Tensor = x.unflatten(-1, (count, -1)).permute(1, 2, 0, 3)  # [B, heads, T, d]
        return found

    q, k, v = (parted(x) for x in _projected(given))
    p = given["dropout_p"] if given["training"] else 0.0
    out, weights = attended(q, k, v, _mask(given, q, (batch, count)), 1 / math.sqrt(q.shape[-1]), p)
    out = F.linear(out.permute(2, 0, 1, 3).reshape(times, batch, -1), given["out_proj_weight"], given["out_proj_bias"])
    if not given["need_weights"]:
        return out, None
    return out, weights.mean(1) if given["average_attn_weights"] else weights


def _is_to_itself(given: dict[str, Any]) -> bool:
    same = given["query"] is given["key"] is given["value"] and not given["use_separate_proj_weight"]
    return same and not given["need_weights"]


def _by_core(core: Core, given: dict[str, Any]) -> Tensor:
    x, count = given["query"], given["num_heads"]
    times, batch, _ = x.shape
    mask = _mask(given, x, (batch, count))
    whole = None if mask is None else mask.expand(batch, count, times, times)
    first = x.stride(0) >= x.stride(1)  # else it came with the examples first, and is computed in that order
    p = given["dropout_p"] if given["training"] else 0.0
    drop = F.dropout(x.new_ones(batch, count, times, times), p) if p else None
    x = F.linear(x if first else x.transpose(0, 1), given["in_proj_weight"], given["in_proj_bias"])
    out = F.linear(core(x, count, whole, drop, first), given["out_proj_weight"], given["out_proj_bias"])
    return out if first else out.transpose(0, 1)


def _projected(given: dict[str, Any]) -> list[Tensor]:
    inputs, bias = [given[name] for name in ("query", "key", "value")], given["in_proj_bias"]
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    elif inputs[0] is inputs[1] is inputs[2]:
        return list(F.linear(inputs[0], given["in_proj_weight"], bias).chunk(3, -1))
    else:
        weights = given["in_proj_weight"].chunk(3)
    biases = [None] * 3 if bias is None else bias.chunk(3)
    return [F.linear(*parts) for parts in zip(inputs, weights, biases, strict=True)]


def _mask(given: dict[str, Any], like: Tensor, heads: tuple[int, int]) -> Tensor | None:
    """The masks of positions [T, S] or [B * heads, T, S] and of padding [B, S], added up."""
    mask, padding = (_added(given[name], like, keep=False) for name in ("attn_mask", "key_padding_mask"))
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, heads)
    if padding is None:
        return mask
    padding = padding[:, None, None, :]
    return padding if mask is None else mask + padding
