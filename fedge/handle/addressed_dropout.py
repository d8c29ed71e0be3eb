"""Dropout by address: the same mask on every engine, device and chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import _VF, Tensor
from torch._C import _functorch as functorch
from torch.overrides import TorchFunctionMode

from fedge.handle import attention, recurrent
from fedge.keys import fold_tensor, keep_mask

Masks = Callable[[Tensor, int, torch.Size, float, Tensor], Tensor]
_ELEMENT = {F.dropout, torch.dropout}
_CHANNEL = {F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout}
_RANDOM = {
    F.alpha_dropout, F.rrelu, F.gumbel_softmax, F.fractional_max_pool2d, F.fractional_max_pool3d,
    torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint, torch.randint_like, torch.randperm,
    torch.bernoulli, torch.multinomial, torch.normal, torch.poisson,
    Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.exponential_,
}  # fmt: skip


def scaled_mask(key: Tensor, call: int, shape: torch.Size, p: float, like: Tensor) -> Tensor:
    """What the numbers are multiplied with: 0 where they are dropped, else 1 / (1 - p)."""
    keep = keep_mask(fold_tensor(key, call), shape, p, like.device)
    return keep.to(like.dtype) / (1 - p)


class AddressedDropout(TorchFunctionMode):
    """Dropout whose mask is a function of the step's key, the call's number in the forward pass and the element.

    Any other random operation is an error by name: it would differ between engines. `masks`: the same as `scaled_mask`,
    computed in another way. `usual`: so far every function did what torch does without this mode.
    """

    def __init__(self, key: Tensor, masks: Masks | None = None) -> None:
        super().__init__()
        self.key, self.masks, self.calls, self.draws, self.usual = key, masks or scaled_mask, 0, 0, True

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ELEMENT or (func in _CHANNEL and func is not F.feature_alpha_dropout):
            return self._drop(func, *args, **kwargs)
        if func in recurrent.STATES and (call := recurrent.arguments(func, args)).draws:
            self.usual = False
            with self:  # again: its dropout is drawn in here
                return recurrent.by_layer(call, recurrent.by_torch(func))
        if func is F.scaled_dot_product_attention and _attention_dropout(args, kwargs):
            self.usual = False
            with self:
                return attention.plain(*args, **kwargs)
        if func is F.multi_head_attention_forward and attention.draws(*args, **kwargs):
            self.usual = False
            with self:
                return attention.heads(*args, **kwargs)
        if func is F.embedding and (padding := _padding(*args, **kwargs)) is not None:
            self.usual = False
            return padding
        if func is _VF._pack_padded_sequence:
            recurrent.refuse_packed()
        if func in _RANDOM or func is F.feature_alpha_dropout:
            name = getattr(func, "__name__", str(func))
            raise RuntimeError(
                f"the model calls the random operation '{name}', which has no addressed form: "
                "use nn.Dropout (1d, 2d, 3d), whose masks fedge addresses, or remove it"
            )
        return func(*args, **kwargs)

    def _drop(self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        self.calls += 1
        self.usual = False
        if not training or p == 0:
            return input
        self.draws += 1
        if p == 1:
            return torch.zeros_like(input)
        shape = input.shape if func in _ELEMENT else _channels(func, input)
        return input * self.masks(self.key, self.calls, shape, p, input)


def _channels(func: Any, input: Tensor) -> torch.Size:
    """The shape of a mask that drops whole channels: [B, C, 1, ...]."""
    spatial = {F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}[func]
    return torch.Size([*input.shape[: input.dim() - spatial], *([1] * spatial)])


def _attention_dropout(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))


def _padding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor | None:  # fmt: skip
    """An embedding with a padding number, whose vector is never trained; torch says so only to the backward pass."""
    if scale_grad_by_freq and _is_stacked(input):
        raise RuntimeError(
            "an embedding with scale_grad_by_freq=True cannot be stacked: it counts the words in the batch of one "
            "client, and stacked batches have padding, which would count"
        )
    if padding_idx is None or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    out = torch.embedding(weight, input)
    return torch.where((input == padding_idx % len(weight)).unsqueeze(-1), out.detach(), out)


def _is_stacked(tensor: Tensor) -> bool:
    """Whether vmap has it, outside or inside of a gradient."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False
