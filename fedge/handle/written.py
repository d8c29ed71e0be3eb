"""A handle whose gradient is written down layer by layer, where the module is a chain.

To an algorithm it is the same function. Under vmap, `Gradient` does not let torch vectorise autograd's steps one by
one: it is told the jobs and computes all of them with the layers' rules for many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch.autograd import Function

from fedge.core import Batch, Loss, Params
from fedge.handle.chain import read
from fedge.handle.layer import Layer
from fedge.handle.plain import Handle
from fedge.handle.stacked.rule import leading
from fedge.handle.tape import Many, One
from fedge.inputs import Inputs, Spec, flatten, rebuild
from fedge.losses import is_cross_entropy


class Program:
    """The written-down gradient of a chain and a loss.

    `half`: layers compute in bfloat16, on parameters, losses and gradients that stay as they are. `alone` are the
    layers for one job on a CPU, some of which may be joined (`join`).
    """

    def __init__(self, layers: list[Layer], loss: Loss, fused: bool = False, half: bool = False) -> None:
        self.layers, self.loss, self.fused, self.half = layers, loss, fused, half
        self.alone = layers

    @property
    def joins(self) -> bool:
        return self.alone != self.layers

    def many(self, x: Tensor, y: Tensor, mask: Tensor, key: Tensor, params: Params) -> Params:
        """The gradients of J jobs, everything with a leading job axis."""
        if not self.half:
            return self._backward(Many(params, key, self.fused), x, y, mask)
        tape = Many({name: leaf.bfloat16() for name, leaf in params.items()}, key, self.fused)
        grads = self._backward(tape, x.bfloat16(), y, mask)
        return {name: leaf.to(params[name].dtype) for name, leaf in grads.items()}

    def one(self, x: Tensor, y: Tensor, mask: Tensor, key: Tensor, params: Params) -> Params:
        """The gradient of one job."""
        if x.device.type == "cpu" and not self.half:
            tape = One(params, key)
            for layer in self.alone:
                x = layer.one(tape, x)
            return tape.backward(self.downhill(x, y, mask))
        first = {name: leaf.unsqueeze(0) for name, leaf in params.items()}
        found = self.many(x.unsqueeze(0), y.unsqueeze(0), mask.unsqueeze(0), key.unsqueeze(0), first)
        return {name: leaf.squeeze(0) for name, leaf in found.items()}

    def _backward(self, tape: Many, x: Tensor, y: Tensor, mask: Tensor) -> Params:
        for layer in self.layers:
            x = layer.many(tape, x)
        logits = tape.turn(x, False)
        if not self.half:
            return tape.backward(self.downhill(logits, y, mask))
        return tape.backward(self.downhill(logits.float(), y, mask).bfloat16())

    def downhill(self, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return downhill(self.loss, logits, y, mask)


def downhill(loss: Loss, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """d (mean loss over the real examples) / d logits, [..., B, C]."""
    share = mask / mask.sum(-1, keepdim=True, dtype=logits.dtype)
    if is_cross_entropy(loss) and not y.is_floating_point() and logits.dim() == y.dim() + 1 == mask.dim() + 1:
        e = (logits - logits.amax(-1, keepdim=True)).exp_()
        hit = _identity(logits).index_select(0, y.reshape(-1)).view(logits.shape)
        return (e / e.sum(-1, keepdim=True) - hit) * share.unsqueeze(-1)
    lead = mask.dim()
    flat = logits.flatten(0, lead - 1)

    def total(z: Tensor) -> Tensor:
        return torch.where(mask.flatten(), loss(z, y.flatten(0, lead - 1)), 0.0).sum()

    slope: Tensor = torch.func.grad(total)(flat)
    return slope.view(logits.shape) / mask.sum(-1).view(*mask.shape[:-1], *[1] * (logits.dim() - lead + 1))


_IDENTITIES: dict[Any, Tensor] = {}


def _identity(like: Tensor) -> Tensor:
    """Row c is the one-hot vector of class c."""
    key = (like.shape[-1], like.dtype, like.device)
    if key not in _IDENTITIES:
        _IDENTITIES[key] = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    return _IDENTITIES[key]


class Gradient(Function):
    """The program as one differentiable-looking call, with its own rule for many jobs."""

    @staticmethod
    def forward(program: Program, names: tuple[str, ...], spec: Spec, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = program.one(*batch_and_params(names, spec, tensors))
        return tuple(found[name] for name in names)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], program: Program, names: tuple[str, ...], spec: Spec, *tensors: Tensor) -> Any:  # fmt: skip # noqa: E501
        stacked = [leading(tensor, dim, info.batch_size) for tensor, dim in zip(tensors, in_dims[3:], strict=True)]
        found = program.many(*batch_and_params(names, spec, stacked))
        return tuple(found[name] for name in names), (0,) * len(names)


def batch_and_params(
    names: tuple[str, ...], spec: Spec, tensors: Sequence[Tensor]
) -> tuple[Inputs, Tensor, Tensor, Tensor, Params]:
    """x, y, mask, key and parameters by name, from all tensors one after another."""
    inputs, (y, mask, key), leaves = tensors[: -3 - len(names)], tensors[-3 - len(names) :][:3], tensors[-len(names) :]
    return rebuild(inputs, spec), y, mask, key, dict(zip(names, leaves, strict=True))


def written_gradient(program: Any, params: Params, batch: Batch) -> Params:
    """The program's gradient of one client; within vmap, of all of them at once."""
    names, (parts, spec) = tuple(params), flatten(batch.x)
    tensors = (*parts, *batch[1:], *params.values())
    if not torch.is_grad_enabled() and not any(map(functorch.is_functorch_wrapped_tensor, tensors)):
        alone: Params = program.one(*batch, params)  # what `apply` would do, which takes as long as a small step
        return {name: alone[name] for name in names}
    found = Gradient.apply(program, names, spec, *tensors)  # type: ignore[no-untyped-call]
    return dict(zip(names, found, strict=True))


class WrittenHandle(Handle):
    """The same functions; the gradient is the program's."""

    def __init__(self, module: nn.Module, loss: Loss, device: torch.device | str = "cpu", **options: bool) -> None:
        super().__init__(module, loss, device)
        self.program = Program(read(module), loss, **options)

    def laid_out(self, x: Tensor) -> Tensor:
        """Images with the channels of a pixel side by side: pooling them is ten times faster on a CPU.

        Only here, where every layer is known: a `view` in a user's own module may fail on this layout.
        """
        if x.device.type != "cpu" or x.dim() != 4:
            return x
        _, channels, height, width = x.shape
        # The strides are given explicitly: with one channel torch cannot tell the two orders apart.
        strides = (channels * height * width, 1, channels * width, channels)
        return x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, strides)

    def grad(self, params: Params, batch: Batch) -> Params:
        return written_gradient(self.program, params, batch)
