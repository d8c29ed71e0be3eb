"""What a layer kind says of itself; the kinds are in `layers`, one file each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from torch import Tensor

from fedge.core import Params
from fedge.handle.tape import Many, One


class NotAChain(ValueError):
    """Why a module has no written-down gradient."""


@dataclass(frozen=True)
class Call:
    """One step of a module's forward pass, as the kinds are asked about it."""

    name: str
    target: Any  # the class of the layer that is called, a function, or the name of a method of tensors
    part: Any = None  # the layer that is called, if it is one
    args: tuple[Any, ...] = ()  # those after the input
    options: Mapping[str, Any] = field(default_factory=dict)

    def is_any_of(self, *targets: Any) -> bool:
        """Whether it is one of these, called on its input and nothing else."""
        return self.target in targets and not self.args and not set(self.options) - {"inplace"}


class Squared(NamedTuple):
    """A function to call in place of a layer: its gradient in the weight is the sum of squares over the examples."""

    rule: Any
    inputs: tuple[Any, ...]
    weight: Tensor


@dataclass(frozen=True)
class Layer(ABC):
    """One layer of a chain; a subclass is a kind and its fields are its settings."""

    name: str

    @classmethod
    @abstractmethod
    def match(cls, call: Call) -> Self | None:
        """The layer, if the call is of this kind; `NotAChain` if it is, with settings that have no rule."""

    @abstractmethod
    def one(self, tape: One, x: Tensor) -> Tensor:
        """The output for one job, from x [B, ...]; records the backward pass on the tape."""

    @abstractmethod
    def many(self, tape: Many, x: Tensor) -> Tensor:
        """The same for J jobs, everything with a leading job axis."""

    @staticmethod
    def squares(function: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Squared | None:
        """For the Fisher diagonal: the rule for this call of torch, if the call is of this kind and has weights."""
        return None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the module's parameters that the layer uses."""
        return ()

    def goes_before(self, layer: Layer) -> bool:
        """Whether it may be applied before the layer in front of it, with the same result and gradient, and faster."""
        return False


@dataclass(frozen=True)
class Weighted(Layer):
    """A layer with a weight and perhaps a bias."""

    weight: str
    bias: str | None

    @classmethod
    def named(cls, call: Call, **settings: Any) -> Self:
        """The layer of this call, its parameters named as in the module."""
        bias = None if call.part.bias is None else f"{call.name}.bias"
        return cls(name=call.name, weight=f"{call.name}.weight", bias=bias, **settings)

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def values(self, params: Params) -> tuple[Tensor, Tensor | None]:
        return params[self.weight], None if self.bias is None else params[self.bias]


def pair(size: Any) -> tuple[int, int]:
    """A height and a width, where torch takes one number for both."""
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))


def arguments(args: tuple[Any, ...], options: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call by the names in `defaults`, in their order."""
    given = dict(zip(defaults, args, strict=False)) | dict(options)
    return [given.get(name, default) for name, default in defaults.items()]
