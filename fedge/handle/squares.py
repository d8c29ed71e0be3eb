"""Sums of squared per-example gradients in one backward pass.

For a layer z = W a the gradient of example i is g_i a_i^T, so the sum of its squares is (g*g)^T (a*a): two factors that
the backward pass has in hand. `Squares` swaps linear and convolution layers for functions whose gradient in the weight
is that sum, and in the input is the ordinary one; then the gradient of sum_i loss_i is the sum of squares for every
weight. A convolution needs its per-example gradients [B, out, in * kernel], but only while its own layer is visited.
(Dangel et al., BackPACK, ICLR 2020, extract the same.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fedge.core import Batch, Params

if TYPE_CHECKING:
    from fedge.handle.plain import Handle

_CONV = {F.conv1d: 1, F.conv2d: 2}


class _Linear(Function):
    """z = a W^T + b with squared weight gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(a, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, weight, bias = inputs
        ctx.save_for_backward(a, weight)
        ctx.has_bias = bias is not None

    @staticmethod
    @torch.no_grad()  # torch.func.grad would keep every step of this for a second derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        a, weight = ctx.saved_tensors
        if g.dim() == 2:
            squares, biases = (g * g).mT @ (a * a), (g * g).sum(0)
        else:  # [B, ..., out]: the positions of one example add up before the square
            example = g.flatten(1, -2).mT @ a.flatten(1, -2)
            squares, biases = (example * example).sum(0), g.flatten(1, -2).sum(1).square().sum(0)
        return g @ weight, squares, biases if ctx.has_bias else None


class _Conv(Function):
    """z = W * a + b with squared weight gradients; stride, padding, dilation and groups as they come."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, weight: Tensor, bias: Tensor | None, where: tuple[Any, ...], groups: int) -> Tensor:
        stride, padding, dilation = where
        return torch.convolution(a, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, weight, bias, ctx.where, ctx.groups = inputs
        ctx.save_for_backward(a, weight)
        ctx.has_bias = bias is not None

    @staticmethod
    @torch.no_grad()  # torch.func.grad would keep every step of this for a second derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        a, weight = ctx.saved_tensors
        patches = _patches(a, weight, ctx.where).unflatten(1, (ctx.groups, -1))  # [B, groups, in * kernel, L]
        outs = g.flatten(2).unflatten(1, (ctx.groups, -1))  # [B, groups, out, L]
        squares = (outs @ patches.mT).square().sum(0).view(weight.shape)
        biases = g.flatten(2).sum(2).square().sum(0) if ctx.has_bias else None
        return _into(g, a, weight, ctx.where, ctx.groups), squares, biases, None, None


def _patches(a: Tensor, weight: Tensor, where: tuple[Any, ...]) -> Tensor:
    """The patches that the kernel sees, [B, in * kernel, L]; one dimension is two of which one has length 1."""
    if len(where[0]) == 1:
        a, where = a.unsqueeze(2), tuple((one, *part) for one, part in zip((1, 0, 1), where, strict=True))
    stride, padding, dilation = where
    return F.unfold(a, (1, *weight.shape[2:])[-2:], dilation=dilation, padding=padding, stride=stride)


def _into(g: Tensor, a: Tensor, weight: Tensor, where: tuple[Any, ...], groups: int) -> Tensor:
    """The ordinary gradient in the layer's input."""
    stride, padding, dilation = where
    found: Tensor = torch.ops.aten.convolution_backward(
        g, a, weight, None, stride, padding, dilation, False, [0] * len(stride), groups, (True, False, False)
    )[0]
    return found


class Squares(TorchFunctionMode):
    """Within it, layers whose weights are among `fast` have squared weight gradients."""

    def __init__(self, fast: Params) -> None:
        super().__init__()
        self.fast = {id(leaf) for leaf in fast.values()}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = _layer(func, args, kwargs or {})
        if call is None or id(call[2]) not in self.fast:
            return func(*args, **(kwargs or {}))
        return call[0].apply(*call[1:])


def _layer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """(function, input, weight, bias, ...) if this is a layer with a rule, else None."""
    if func is F.linear:
        return _Linear, *_bind(args, kwargs, ("input", "weight", "bias"), (None,))
    if func not in _CONV:
        return None
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    a, weight, bias, *where, groups = _bind(args, kwargs, names, (None, 1, 0, 1, 1))
    if any(isinstance(part, str) for part in where) or a.dim() != _CONV[func] + 2:
        return None
    sizes = tuple(tuple(part) if isinstance(part, list | tuple) else (part,) * _CONV[func] for part in where)
    return _Conv, a, weight, bias, sizes, groups


def _bind(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...], defaults: tuple[Any, ...]
) -> list[Any]:
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(name, default) for name, default in zip(names, (None, None, *defaults), strict=True)]


class _Uses(TorchFunctionMode):
    """Counts how often each parameter is an argument of any operation, and of a layer with a rule."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        self.names = {id(leaf): name for name, leaf in params.items()}
        self.all: Counter[str] = Counter()
        self.by_rule: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        found = [self.names[id(leaf)] for leaf in leaves if id(leaf) in self.names]
        self.all.update(found)
        if _layer(func, args, kwargs or {}) is not None:
            self.by_rule.update(found)
        return func(*args, **(kwargs or {}))


def separable(handle: Handle, params: Params, batch: Batch) -> list[str]:
    """The parameters whose squares come out right in one pass, found once on the module's own weights.

    Candidates are used exactly once, by a layer with a rule. Whether a layer really sees one example a row (and not,
    say, time folded into the batch) cannot be read off its call, so each candidate is tried on three examples against
    one gradient an example; what disagrees falls back to that.
    """
    own = {name: leaf.detach() for name, leaf in handle.module.named_parameters() if name in params}
    x = _noise((3, *batch.x.shape[1:]), batch.x)
    with _Uses(own) as uses:
        out = handle.logits(own, x)
    mix = _noise(tuple(out.shape), out)

    def losses(params: Params) -> Tensor:
        return (torch.tanh(handle.logits(params, x)) * mix).flatten(1).sum(1)

    names = [name for name in params if uses.all[name] == uses.by_rule[name] == 1]
    while names:
        right = _agreeing(losses, own, names)
        if right == names:
            break
        names = right
    return names


def _agreeing(losses: Callable[[Params], Tensor], own: Params, names: list[str]) -> list[str]:
    fast = {name: own[name] for name in names}
    rest = {name: leaf for name, leaf in own.items() if name not in fast}

    def total(fast: Params) -> Tensor:
        with Squares(fast):
            return losses(fast | rest).sum()

    found = torch.func.grad(total)(fast)
    singly = [torch.func.grad(lambda p, i=i: losses(p | rest)[i])(fast) for i in range(3)]
    right = []
    for name in names:
        wanted = sum((one[name].square() for one in singly), torch.zeros_like(own[name]))
        if bool((found[name] - wanted).abs().max() <= 1e-3 * wanted.abs().max()):
            right.append(name)
    return right


def _noise(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Numbers without pattern, and without a generator; small whole ones where the input is made of those."""
    count = math.prod(shape)
    steps = torch.arange(count, device=like.device).view(shape)
    if not like.is_floating_point():
        return (steps % 2).to(like.dtype)
    return torch.sin(steps.double() * 12.9898 + 1.0).to(like.dtype)
