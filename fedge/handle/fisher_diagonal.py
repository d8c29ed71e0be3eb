"""Sums of squared per-example gradients in one backward pass.

For a layer z = W a the gradient of example i is g_i a_i^T, so the sum of its squares is (g*g)^T (a*a): two factors that
the backward pass has at hand. `Squares` swaps layers with weights for functions whose gradient in the weight is that
sum, and in the input is the ordinary one; then the gradient of sum_i loss_i is the sum of squares for every weight.
(Dangel et al., BackPACK, ICLR 2020, extract the same.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fedge.core import Batch, Params
from fedge.handle import layers as table
from fedge.handle.layer import Squared
from fedge.inputs import Inputs, map_

if TYPE_CHECKING:
    from fedge.handle.plain import Handle


class Squares(TorchFunctionMode):
    """Within it, layers whose weights are among `fast` have squared weight gradients."""

    def __init__(self, fast: Params) -> None:
        super().__init__()
        self.fast = {id(leaf) for leaf in fast.values()}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = rule_of(func, args, kwargs)
        if found is None or id(found.weight) not in self.fast:
            return func(*args, **(kwargs or {}))
        return found.rule.apply(*found.inputs)


def rule_of(func: Any, args: tuple[Any, ...], kwargs: Any) -> Squared | None:
    """What to call in place of this call of torch, if it is a layer's with weights."""
    found = (kind.squares(func, args, kwargs or {}) for kind in table.KINDS)
    return next((rule for rule in found if rule is not None), None)


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
        if rule_of(func, args, kwargs) is not None:
            self.by_rule.update(found)
        return func(*args, **(kwargs or {}))


def separable(handle: Handle, params: Params, batch: Batch) -> list[str]:
    """The parameters whose squares come out right in one pass, found once on the module's own weights.

    Candidates are used exactly once, by a layer with a rule. Whether a layer really sees one example per row (and not,
    say, time folded into the batch) cannot be read off its call, so each candidate is tried on three examples against
    one gradient per example; what disagrees falls back to that.
    """
    own = {name: leaf.detach() for name, leaf in handle.module.named_parameters() if name in params}
    x = noisy(3, batch.x)
    with _Uses(own) as uses:
        out = handle.logits(own, x)
    mix = noise(tuple(out.shape), out)

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


def noisy(examples: int, x: Inputs) -> Inputs:
    """So many examples like these, of numbers without pattern."""
    return map_(lambda part: noise((examples, *part.shape[1:]), part), x)


def noise(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Numbers without pattern, and without a generator; small whole ones where the input is made of those."""
    count = math.prod(shape)
    steps = torch.arange(count, device=like.device).view(shape)
    if not like.is_floating_point():
        return (steps % 2).to(like.dtype)
    return torch.sin(steps.double() * 12.9898 + 1.0).to(like.dtype)
