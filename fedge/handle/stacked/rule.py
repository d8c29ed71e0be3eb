"""What a rule is: how one torch function is computed for J clients at once.

vmap has a rule of its own for nearly every function of torch. The rules here replace those whose batched form is slow:
where every client has weights of its own, vmap copies the weights for every example, makes one convolution of J groups,
or takes a recurrent layer apart into thousands of operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

Many = Callable[..., Any]  # tensors with a leading client axis -> the same of the outputs
One = Callable[..., Any]


class Rule(Function):
    """`one` for one client; under vmap, `many` for all clients, whose tensors all have a leading client axis."""

    @staticmethod
    def forward(one: One, many: Many, *tensors: Tensor) -> Any:
        return one(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], one: One, many: Many, *tensors: Tensor) -> Any:
        stacked = [leading(tensor, dim, info.batch_size) for tensor, dim in zip(tensors, in_dims[2:], strict=True)]
        found = many(*stacked)
        return found, (0,) * len(found) if isinstance(found, tuple) else 0


def stacked(one: One, many: Many, *tensors: Tensor) -> Any:
    """What `one` does to the tensors of one client; within vmap over clients it is done by `many`."""
    return Rule.apply(one, many, *tensors)  # type: ignore[no-untyped-call]


def leading(tensor: Tensor, dim: int | None, jobs: int) -> Tensor:
    """The tensor with the client axis in front; what all clients share is expanded."""
    if dim is None:
        return tensor.expand(jobs, *tensor.shape)
    return tensor if dim == 0 else tensor.movedim(dim, 0)


def per_job(weight: Tensor, dims: int) -> Tensor:
    """A client's vector [J, C] against its examples: [J, 1, C, 1, ...] with `dims` dimensions behind the channels."""
    return weight.view(len(weight), 1, weight.shape[1], *[1] * dims)
