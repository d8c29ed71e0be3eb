"""Optimisers as pure functions on dicts of tensors; the same ones serve at the clients and at the server.

`start` makes the state, `step` takes one step of size `lr`, which a `factor` may shrink (`schedule`). Any object with
these two methods will do, of your own class too: pure, on one client's tensors, for one step. SGD and Adam compute what
torch.optim does, so that a client here and a plain loop there agree to rounding. lr is a factor of the update alone:
a step that is compiled for one lr then serves all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fedge import tree
from fedge.algorithms.spectral import Spectral
from fedge.checks import non_negative, positive, unit_interval
from fedge.core import Params

Moments = dict[str, Params | Tensor]


@runtime_checkable
class Optimiser(Protocol):
    """What FedAvg needs of an optimiser; a frozen dataclass of hyper-parameters is written into the run folder."""

    def start(self, params: Params) -> Moments:
        """The state before the first step; a dict without keys if there is none."""
        ...

    def step(
        self, params: Params, grad: Params, state: Moments, lr: float, factor: Tensor | None = None
    ) -> tuple[Params, Moments]:
        """The parameters and the state after a step of size lr times `factor`, if there is one."""
        ...


def clipped(most: float | None, grad: Params) -> Params:
    """g min(1, most / |g|), over all tensors together, as torch.nn.utils.clip_grad_norm_ has it.

    One large gradient among thousands can ruin a client's network for good, and the server's with it. A step of plain
    SGD is then at most lr * most long.
    """
    if most is None:
        return grad
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(leaf) for leaf in grad.values()]))
    return tree.scale((most / (norm + 1e-6)).clamp(max=1.0), grad)


@dataclass(frozen=True)
class SGD:
    """v <- mu v + (g + lambda w);  w <- w - lr v."""

    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        unit_interval("momentum", self.momentum)
        non_negative("weight_decay", self.weight_decay)

    def start(self, params: Params) -> Moments:
        return {"v": tree.zeros_like(params)} if self.momentum else {}

    def step(
        self, params: Params, grad: Params, state: Moments, lr: float, factor: Tensor | None = None
    ) -> tuple[Params, Moments]:
        if self.weight_decay:
            grad = tree.axpy(self.weight_decay, params, grad)
        if self.momentum:
            grad = tree.axpy(self.momentum, state["v"], grad)  # type: ignore[arg-type]
            state = {"v": grad}
        return tree.axpy(-lr, _shrunk(factor, grad), params), state


@dataclass(frozen=True)
class Adam:
    """m <- b1 m + (1-b1) g,  v <- b2 v + (1-b2) g^2,  w <- w - lr m^ / (sqrt(v^) + eps); decay enters g."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for beta in self.betas:
            unit_interval("betas", beta)
        positive("eps", self.eps)
        non_negative("weight_decay", self.weight_decay)

    def start(self, params: Params) -> Moments:
        like = next(iter(params.values()))
        zeros = tree.zeros_like(params)
        return {"m": zeros, "v": zeros, "t": torch.zeros((), dtype=like.dtype, device=like.device)}

    def step(
        self, params: Params, grad: Params, state: Moments, lr: float, factor: Tensor | None = None
    ) -> tuple[Params, Moments]:
        b1, b2 = self.betas
        if self.weight_decay:
            grad = tree.axpy(self.weight_decay, params, grad)
        t = torch.add(state["t"], 1)  # type: ignore[arg-type]
        m = tree.map_(lambda a, g: a + (g - a) * (1 - b1), state["m"], grad)  # type: ignore[arg-type]
        v = tree.map_(lambda a, g: a * b2 + (1 - b2) * g * g, state["v"], grad)  # type: ignore[arg-type]
        size, root = 1 / (1 - torch.pow(b1, t)), (1 - torch.pow(b2, t)).sqrt()
        step = tree.map_(lambda a, c: size * a / (c.sqrt() / root + self.eps), m, v)
        return tree.axpy(-lr, _shrunk(factor, step), params), {"m": m, "v": v, "t": t}


def has_momentum(optimiser: Optimiser) -> bool:
    """Whether its whole state is known to be one momentum {"v": ...}, which can travel."""
    return isinstance(optimiser, SGD | Spectral) and optimiser.momentum > 0


def _shrunk(factor: Tensor | None, step: Params) -> Params:
    return step if factor is None else tree.scale(factor, step)
