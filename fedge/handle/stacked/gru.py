"""GRU layers of J clients: the inputs' product for all times at once, then one batched product per time step.

    r, z = sigmoid(W^rz x_t + b^rz + V^rz h_{t-1} + a^rz)        m = V^n h_{t-1} + a^n
    n = tanh(W^n x_t + b^n + r m)                                h_t = (1 - z) n + z h_{t-1}

(Cho et al., EMNLP 2014, in torch's form.) The factors of the backward pass do not depend on the gradients and are
computed for all times at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fedge.handle.stacked.operator import operator

Outputs = tuple[Tensor, ...]


def _forward(x: Tensor, h: Tensor, w: Tensor, v: Tensor, b: Tensor, a: Tensor) -> list[Tensor]:
    """x [J, T, B, D], h [J, B, H], w [J, 3H, D], v [J, 3H, H], b and a [J, 3H]: all h, gates r and z, n and m."""
    jobs, times, examples, _ = x.shape
    width = h.shape[-1]
    inputs = torch.baddbmm(b.unsqueeze(1), x.flatten(1, 2), w.mT).view(jobs, times, examples, -1)
    hs, ns, ms = (x.new_empty(jobs, times + extra, examples, width) for extra in (1, 0, 0))
    gates = x.new_empty(jobs, times, examples, 2 * width)
    hs[:, 0] = h
    v, a = v.mT, a.unsqueeze(1)
    for t in range(times):
        found, into = torch.baddbmm(a, h, v), inputs[:, t]
        gate = torch.sigmoid(found[..., : 2 * width] + into[..., : 2 * width], out=gates[:, t])
        m = ms[:, t].copy_(found[..., 2 * width :])
        n = torch.tanh(torch.addcmul(into[..., 2 * width :], gate[..., :width], m), out=ns[:, t])
        h = torch.lerp(n, h, gate[..., width:], out=hs[:, t + 1])
    return [hs, gates, ns, ms]


def _backward(dh: Tensor, x: Tensor, w: Tensor, v: Tensor, hs: Tensor, gates: Tensor, ns: Tensor, ms: Tensor) -> list[Tensor]:  # fmt: skip # noqa: E501
    """From the gradients in all h to those in x, h_0, W, V, b and a."""
    _, times, _, width = ns.shape
    r, z = gates.chunk(2, -1)
    new = torch.addcmul(1 - z, 1 - z, ns * ns, value=-1)  # d h_t / d (argument of tanh)
    factors = torch.cat([torch.addcmul(gates, gates, gates, value=-1), new * r], -1).unflatten(-1, (3, width))
    factors[..., 0, :] *= new * ms
    factors[..., 1, :] *= hs[:, :-1] - ns
    heres, flat = torch.empty_like(ns), factors.flatten(-2)
    back = torch.zeros_like(dh[:, 0])
    for t in range(times - 1, -1, -1):
        here = torch.add(dh[:, t], back, out=heres[:, t])
        factors[:, t] *= here.unsqueeze(2)
        back = torch.addcmul(torch.bmm(flat[:, t], v), here, z[:, t])
    rows = flat.flatten(1, 2)
    dv, da = rows.mT @ hs[:, :-1].flatten(1, 2), rows.sum(1)
    torch.mul(new, heres, out=factors[..., 2, :])  # the third gate sees its input without r
    dw, db = rows.mT @ x.flatten(1, 2), rows.sum(1)
    return [(rows @ w).view(x.shape), back, dw, dv, db, da]


forward = operator("gru", _forward, 6)
backward = operator("gru_backward", _backward, 8)


class Layer(Function):
    """One layer in one direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, w: Tensor, v: Tensor, b: Tensor, a: Tensor) -> Tensor:
        hs, gates, ns, ms = forward(x, h, w, v, b, a)
        ctx.save_for_backward(x, w, v, hs, gates, ns, ms)
        out: Tensor = hs[:, 1:].clone()  # what is saved is not what a model may write into
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Outputs:
        return tuple(backward(grads[0], *ctx.saved_tensors))
