"""The model handle in its plain form: a functional view of any nn.Module, built on torch.func.

It works unbatched and under vmap, so a task that calls it is written for one client and runs for all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedge.core import Batch, Loss, Params
from fedge.handle import curvature
from fedge.handle.addressed_dropout import AddressedDropout
from fedge.handle.fisher_diagonal import separable
from fedge.handle.layer_inputs import Moments, complete, sides
from fedge.handle.module import check_module, is_still, leave_weights_apart
from fedge.handle.recurrent import ByStep
from fedge.handle.swapped import Swapped
from fedge.inputs import Inputs, arguments


def _check_losses(out: Tensor, y: Tensor, logits: Tensor) -> None:
    if out.shape != y.shape[:1]:
        raise ValueError(
            f"the loss returned shape {list(out.shape)} for {len(y)} examples; "
            f"it must return one value per example {_remedy(out, y, logits)}"
        )


def _remedy(out: Tensor, y: Tensor, logits: Tensor) -> str:
    """What to write in place of a loss that gives too few values or too many."""
    if not out.dim():
        return "(reduction='none')"
    if out.shape == y.shape or out.shape == logits.shape:
        return "and gave one per number: take their mean, loss(out, y).flatten(1).mean(1), or use fedge.losses.mse"
    shapes = f"outputs of shape {list(logits.shape)} with targets of shape {list(y.shape)}"
    return f"and paired {shapes}: compare out[:, 0] with y, or use fedge.losses.mse"


class Handle:
    """An nn.Module and a per-example loss as pure functions of the parameters."""

    def __init__(self, module: nn.Module, loss: Loss, device: torch.device | str = "cpu") -> None:
        check_module(module)
        self.module = copy.deepcopy(module).to(device).requires_grad_(False)
        leave_weights_apart(self.module)
        self.swapped = Swapped(self.module)
        self._still = [layer for layer in self.module.modules() if is_still(layer)]
        self.per_example = loss
        self._separable: list[str] | None = None
        self.usual = False  # whether in the last pass in training mode every function did what torch does

    def logits(
        self, params: Params, x: Inputs, key: Tensor | None = None, mode: AbstractContextManager[Any] | None = None
    ) -> Tensor:
        """The module's output; with a key in training mode, dropout addressed by it, else in evaluation mode.

        Within `mode`, if there is one, the module's functions are computed in another way.
        """
        if self.module.training != (key is not None):
            self.set_training(key is not None)
        masks = getattr(mode, "masks", None)
        with AddressedDropout(key, masks) if key is not None else nullcontext() as dropout, mode or nullcontext():
            out: Tensor = self.swapped(params, *arguments(x))
        self.usual = dropout is not None and dropout.usual
        return out

    def as_torch(self, params: Params, x: Inputs) -> Tensor:
        """The module's output in training mode, with nothing addressed."""
        if not self.module.training:
            self.set_training(True)
        out: Tensor = self.swapped(params, *arguments(x))
        return out

    def set_training(self, training: bool) -> None:
        """Training or evaluation mode; normalisations with frozen statistics stay in evaluation mode."""
        self.module.train(training)
        for layer in self._still:
            layer.eval()

    def laid_out(self, x: Inputs) -> Inputs:
        """The same examples, in the order in memory in which `logits` is fastest."""
        return x

    def losses(self, params: Params, batch: Batch, mode: AbstractContextManager[Any] | None = None) -> Tensor:
        """One loss per example, [B], zero on padding."""
        logits = self.logits(params, batch.x, batch.key, mode)
        out = self.per_example(logits, batch.y)
        _check_losses(out, batch.y, logits)
        return torch.where(batch.mask, out, 0.0)

    def check_loss(self, params: Params, x: Inputs, y: Tensor) -> None:
        """Refuse a loss that does not give one value per example; class labels are taken as the first class."""
        y = y if y.is_floating_point() else torch.zeros_like(y)
        logits = self.logits(params, x)
        _check_losses(self.per_example(logits, y), y, logits)

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """The mean loss over the real examples of the batch."""
        return self.losses(params, batch).sum() / batch.examples

    def grad(self, params: Params, batch: Batch) -> Params:
        """The gradient of `loss` in the parameters."""
        gradient: Callable[..., Params] = torch.func.grad(self.loss)
        return gradient(params, batch)

    def sum_sq_grad(self, params: Params, batch: Batch) -> Params:
        """sum_i (d loss_i / d w)^2 over the real examples: n times the diagonal of the empirical Fisher."""
        if self._separable is None:
            self._separable = separable(self, params, batch)
        return curvature.sum_sq_grad(lambda p: self.losses(p, batch, ByStep()), params, self._separable)

    def sum_inputs(self, params: Params, batch: Batch, largest: int) -> Params:
        """sum_i (a_i, 1) (a_i, 1)^T over the real examples, by weight; a_i is what the weight is multiplied with.

        In evaluation mode. An input of a convolution is a patch. [in + 1, in + 1] for every parameter with two or more
        axes and in + 1 <= `largest`; zeros if it is not the weight of one linear layer or convolution.
        """
        if self._separable is None:
            self._separable = separable(self, params, batch)
        wanted = {name: params[name] for name in self._separable if name in sides(params, largest)}
        seen = Moments(wanted, batch.mask)
        self.logits(params, batch.x, mode=seen)
        return complete(seen.found, params, largest)

    def sum_fisher_product(self, params: Params, batch: Batch, v: Params) -> Params:
        """sum_i g_i (g_i . v) over the real examples, g_i the gradient of one example."""
        return curvature.sum_fisher_product(lambda p: self.losses(p, batch, ByStep()), params, v)

    def sum_gauss_newton_product(self, params: Params, batch: Batch, v: Params) -> Params:
        """sum_i J_i^T H_i J_i v over the real examples (Eq. 8), H_i the loss's Hessian in the logits."""
        return curvature.sum_gauss_newton_product(*self._outer(batch), params, v)

    def sum_squared_slope_product(self, params: Params, batch: Batch, v: Params) -> Params:
        """sum_i J_i^T diag(r_i^2) J_i v over the real examples (Alg. 1), r_i the loss's slopes in the logits."""
        return curvature.sum_squared_slope_product(*self._outer(batch), params, v)

    def sum_in_span(
        self, params: Params, batch: Batch, basis: list[Params], matrix: Literal["fisher", "gauss_newton"]
    ) -> tuple[Tensor, Tensor]:
        """V^T sum_i g_i, [k], and V^T B V, [k, k], for the k vectors V of the basis and n times either matrix B."""
        if matrix == "fisher":
            return curvature.fisher_in_span(lambda p: self.losses(p, batch, ByStep()), params, basis)
        return curvature.gauss_newton_in_span(*self._outer(batch), params, basis)

    def _outer(self, batch: Batch) -> tuple[Callable[[Params], Tensor], Callable[[Tensor], Tensor]]:
        """The loss of a batch in two halves: parameters -> logits, and logits -> the sum of the real losses."""

        def total(z: Tensor) -> Tensor:
            return torch.where(batch.mask, self.per_example(z, batch.y), 0.0).sum()

        return lambda p: self.logits(p, batch.x, batch.key, ByStep()), total
