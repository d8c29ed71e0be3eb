"""A handle for any module: the clients' forward passes as one, differentiated once.

The gradients of J clients are those of the sum of their losses, because every client has parameters of its own:

    d (sum_j loss_j(w_j)) / d w_j = d loss_j(w_j) / d w_j

So a module's forward pass is batched over the clients, by rules for what has weights (`stacked`) and by vmap for the
rest, and autograd goes back through it once. One client alone is what it would be without fedge: torch's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch.func import functional_call, vmap

from fedge.core import Batch, Loss, Params
from fedge.handle.addressed_dropout import AddressedDropout
from fedge.handle.curvature import in_one_pass
from fedge.handle.fast import Patches
from fedge.handle.fisher_diagonal import noisy, separable
from fedge.handle.global_draws import drawn, undo
from fedge.handle.per_example import squared_examples
from fedge.handle.plain import Handle
from fedge.handle.recurrent import ByStep
from fedge.handle.stacked import Alone, Stacked, naming
from fedge.handle.written import downhill, written_gradient
from fedge.inputs import Inputs, arguments

Rules = Mapping[Any, Callable[..., Any]]


class Differentiated:
    """The gradient of a module and a loss by autograd, for one client and for many.

    `patches`: convolutions as products of patches and weights, which is right for a GPU. `layers`: other rules for
    recurrent layers of many clients. `alone`: functions to call in place of torch's, for one client.
    """

    def __init__(self, handle: Handle, patches: bool, layers: Rules | None = None) -> None:
        self.handle, self.loss, self.patches, self.layers = handle, handle.per_example, patches, layers
        self.alone: Rules = {}
        self._usual: Rules | None = None  # the rules with which everything was torch's own, from then on

    def one(self, x: Inputs, y: Tensor, mask: Tensor, key: Tensor, params: Params) -> Params:
        """The gradient of one job."""
        return self._backward(lambda own: self._alone(own, x, key), y, mask, params)

    def _alone(self, params: Params, x: Inputs, key: Tensor) -> Tensor:
        """The output for one client.

        To look at every call of torch takes as long as the work of a small model. Where nothing was addressed or
        computed in another way before, only the global generator is looked at: a model that draws after all is computed
        again.
        """
        if self._usual is self.alone and key.device.type == "cpu" and not _len_torch_dispatch_stack():
            before = drawn()
            found = self.handle.as_torch(params, x)
            if torch.equal(before, drawn()):
                return found
            undo(before)
        mode = Alone(self.alone)
        found = self.handle.logits(params, x, key, mode)
        self._usual = self.alone if self.handle.usual and mode.usual else None
        return found

    def many(self, x: Inputs, y: Tensor, mask: Tensor, key: Tensor, params: Params) -> Params:
        """The gradients of J jobs, everything with a leading job axis."""

        def forward(own: Params) -> Tensor:
            with Patches() if self.patches else nullcontext():
                return vmap(self._stacked, randomness="error")(own, x, key)

        with naming():
            return self._backward(forward, y, mask, params)

    def _stacked(self, params: Params, x: Inputs, key: Tensor) -> Tensor:
        return self.handle.logits(params, x, key, Stacked(not self.patches, self.layers))

    def _backward(self, forward: Any, y: Tensor, mask: Tensor, params: Params) -> Params:
        own = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
        with torch.enable_grad():
            logits = forward(own)
        slope = downhill(self.loss, logits.detach(), y, mask)
        found = torch.autograd.grad(logits, list(own.values()), slope, materialize_grads=True)
        return dict(zip(params, found, strict=True))


class GraphHandle(Handle):
    """The same functions; the gradients of many clients are one pass through autograd."""

    def __init__(
        self, module: nn.Module, loss: Loss, device: torch.device | str = "cpu", layers: Rules | None = None
    ) -> None:
        super().__init__(module, loss, device)
        self._draws = False
        self.program = Differentiated(self, torch.device(device).type == "cuda", layers)

    def grad(self, params: Params, batch: Batch) -> Params:
        return written_gradient(self.program, params, batch)

    def sum_sq_grad(self, params: Params, batch: Batch) -> Params:
        """Weights with a rule in one pass, the others from one gradient per example, for all examples at once.

        A dropout mask is addressed by the place in the batch: with dropout, examples cannot be taken apart.
        """
        if self._separable is None:
            self._separable = separable(self, params, batch)
            self._draws = self._has_dropout(params, batch)
        if self._draws or len(self._separable) == len(params):
            return super().sum_sq_grad(params, batch)
        fast = {name: params[name] for name in self._separable}
        rest = {name: leaf for name, leaf in params.items() if name not in fast}
        found = in_one_pass(lambda p: self.losses(p, batch, ByStep()), fast, rest) if fast else {}
        found |= squared_examples(self.program, params, fast, batch)
        return {name: found[name] for name in params}

    def _has_dropout(self, params: Params, batch: Batch) -> bool:
        """Whether the forward pass draws dropout masks, on the module's own weights."""
        own = {name: leaf.detach() for name, leaf in self.module.named_parameters() if name in params}
        self.set_training(True)
        with AddressedDropout(torch.zeros((), dtype=torch.long, device=batch.mask.device)) as seen:
            functional_call(self.module, own, *arguments(noisy(2, batch.x)))
        return bool(seen.draws)
