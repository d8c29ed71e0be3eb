"""The model handle in its plain form: a functional view of any nn.Module, built on torch.func.

It works unbatched and under vmap, so a task that calls it is written for one client and runs for all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from fedge.core import Batch, Loss, Params
from fedge.keys import fold_tensor, keep_mask

_ELEMENT = {F.dropout, torch.dropout}
_CHANNEL = {F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout}
_RANDOM = {
    F.alpha_dropout, F.rrelu, F.gumbel_softmax, F.fractional_max_pool2d, F.fractional_max_pool3d,
    torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint, torch.randint_like, torch.randperm,
    torch.bernoulli, torch.multinomial, torch.normal, torch.poisson,
    Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.exponential_,
}  # fmt: skip


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """- log softmax(logits)[y], one value an example."""
    return F.cross_entropy(logits, y, reduction="none")


class AddressedDropout(TorchFunctionMode):
    """Dropout whose mask is a function of the step's key, the call's number in the forward pass and the element.

    Any other random operation is an error by name: it would differ between engines.
    """

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key, self.calls = key, 0

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ELEMENT or (func in _CHANNEL and func is not F.feature_alpha_dropout):
            return self._drop(func, *args, **kwargs)
        if func in _RANDOM or func is F.feature_alpha_dropout or _attention_dropout(func, args, kwargs):
            name = getattr(func, "__name__", str(func))
            raise RuntimeError(
                f"the model calls the random operation '{name}', which has no addressed form: "
                "use nn.Dropout (1d, 2d, 3d), whose masks fedge addresses, or remove it"
            )
        return func(*args, **kwargs)

    def _drop(self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        self.calls += 1
        if not training or p == 0:
            return input
        if p == 1:
            return torch.zeros_like(input)
        shape = input.shape if func in _ELEMENT else _channels(func, input)
        keep = keep_mask(fold_tensor(self.key, self.calls), shape, p, input.device)
        return input * (keep.to(input.dtype) / (1 - p))


def _channels(func: Any, input: Tensor) -> torch.Size:
    """The shape of a mask that drops whole channels: [B, C, 1, ...]."""
    spatial = {F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}[func]
    return torch.Size([*input.shape[: input.dim() - spatial], *([1] * spatial)])


def _attention_dropout(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if func is not F.scaled_dot_product_attention:
        return False
    return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))


class Handle:
    """An nn.Module and a per-example loss as pure functions of the parameters."""

    def __init__(self, module: nn.Module, loss: Loss, device: torch.device | str = "cpu") -> None:
        check_module(module)
        self.module = copy.deepcopy(module).to(device).requires_grad_(False)
        self.per_example = loss

    def logits(self, params: Params, x: Tensor, key: Tensor | None = None) -> Tensor:
        """The module's output; with a key in training mode, dropout addressed by it, else in evaluation mode."""
        if self.module.training != (key is not None):
            self.module.train(key is not None)
        with AddressedDropout(key) if key is not None else nullcontext():
            out: Tensor = torch.func.functional_call(self.module, params, (x,))
        return out

    def losses(self, params: Params, batch: Batch) -> Tensor:
        """One loss an example, [B], zero on padding."""
        out = self.per_example(self.logits(params, batch.x, batch.key), batch.y)
        if out.shape != batch.y.shape[:1]:
            raise ValueError(
                f"the loss returned shape {list(out.shape)} for {len(batch.y)} examples; "
                "it must return one value an example (reduction='none')"
            )
        return torch.where(batch.mask, out, 0.0)

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """The mean loss over the real examples of the batch."""
        return self.losses(params, batch).sum() / batch.examples

    def grad(self, params: Params, batch: Batch) -> Params:
        """The gradient of `loss` in the parameters."""
        gradient: Callable[..., Params] = torch.func.grad(self.loss)
        return gradient(params, batch)


def parameters(module: nn.Module) -> Params:
    """A copy of the trainable parameters by the module's own names; frozen ones stay inside the module."""
    check_module(module)
    return {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}


def check_module(module: nn.Module) -> None:
    """Refuse what cannot be a pure function of its parameters, by the name of the layer."""
    for name, layer in module.named_modules():
        kind = type(layer).__name__
        if isinstance(layer, _BatchNorm) or (isinstance(layer, _InstanceNorm) and layer.track_running_stats):
            raise ValueError(
                f"layer '{name}' ({kind}) mixes the examples of a batch or keeps running statistics, which are "
                "not parameters and have no meaning across clients: use nn.GroupNorm or nn.LayerNorm in its place"
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter '{name}' has no shape yet: run the lazy module on one batch first")
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("the model has no trainable parameters: at least one must require grad")
