"""Local optimisers as pure functions: what torch.optim does, one tensor tree at a time.

State starts at zero for every client in every round. Both follow torch.optim to the last operation, so that a client
here and a plain loop there agree to rounding. What was `sent` may shrink the step (`schedule`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedge import tree
from fedge.algorithms.schedule import scaled
from fedge.core import Params, Payload

Moments = dict[str, Params | Tensor]


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

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def start(self, params: Params) -> Moments:
        return {"v": tree.zeros_like(params)} if self.momentum else {}

    def step(self, params: Params, grad: Params, state: Moments, sent: Payload | None = None) -> tuple[Params, Moments]:
        if self.weight_decay:
            grad = tree.axpy(self.weight_decay, params, grad)
        if self.momentum:
            grad = tree.axpy(self.momentum, state["v"], grad)  # type: ignore[arg-type]
            state = {"v": grad}
        return tree.axpy(-self.lr, scaled(sent or {}, grad), params), state


@dataclass(frozen=True)
class Adam:
    """m <- b1 m + (1-b1) g,  v <- b2 v + (1-b2) g^2,  w <- w - lr m^ / (sqrt(v^) + eps); decay enters g."""

    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def start(self, params: Params) -> Moments:
        like = next(iter(params.values()))
        zeros = tree.zeros_like(params)
        return {"m": zeros, "v": zeros, "t": torch.zeros((), dtype=like.dtype, device=like.device)}

    def step(self, params: Params, grad: Params, state: Moments, sent: Payload | None = None) -> tuple[Params, Moments]:
        b1, b2 = self.betas
        if self.weight_decay:
            grad = tree.axpy(self.weight_decay, params, grad)
        t = torch.add(state["t"], 1)  # type: ignore[arg-type]
        m = tree.map_(lambda a, g: a + (g - a) * (1 - b1), state["m"], grad)  # type: ignore[arg-type]
        v = tree.map_(lambda a, g: a * b2 + (1 - b2) * g * g, state["v"], grad)  # type: ignore[arg-type]
        size, root = self.lr / (1 - torch.pow(b1, t)), (1 - torch.pow(b2, t)).sqrt()
        step = tree.map_(lambda a, c: size * a / (c.sqrt() / root + self.eps), m, v)
        return tree.sub(params, scaled(sent or {}, step)), {"m": m, "v": v, "t": t}


Optimiser = SGD | Adam
