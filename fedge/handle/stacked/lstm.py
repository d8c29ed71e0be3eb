"""LSTM layers of J clients: the inputs' product for all times at once, then one batched product per time step.

    z_t = W x_t + V h_{t-1} + b          i, f, o = sigmoid(z^i_t, z^f_t, z^o_t)          g = tanh(z^g_t)
    c_t = f c_{t-1} + i g                h_t = o tanh(c_t)

(Hochreiter and Schmidhuber, Neural Computation 1997.) tanh(x) = 2 sigmoid(2 x) - 1, so that one call serves all gates;
the factors of the backward pass do not depend on the gradients and are computed for all times at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fedge.handle.stacked.operator import operator

Outputs = tuple[Tensor, ...]


def _forward(x: Tensor, h: Tensor, c: Tensor, w: Tensor, v: Tensor, b: Tensor) -> list[Tensor]:
    """x [J, T, B, D], h and c [J, B, H], w [J, 4H, D], v [J, 4H, H], b [J, 4H]: all h, 2 c, tanh(c) and gates."""
    jobs, times, examples, _ = x.shape
    width = h.shape[-1]
    w, v, b = (_doubled(part, width) for part in (w, v, b))
    z = torch.baddbmm(b.unsqueeze(1), x.flatten(1, 2), w.mT).view(jobs, times, examples, -1)
    hs, cs, bents = (x.new_empty(jobs, times + extra, examples, width) for extra in (1, 1, 0))
    hs[:, 0], cs[:, 0] = h, 2 * c
    before, twice, v, shifts = h, cs[:, 0], v.mT, (x.new_full((), -1.0), x.new_full((), -2.0))
    for t in range(times):
        gate = torch.sigmoid(torch.baddbmm(z[:, t], before, v), out=z[:, t])
        i, f, g, o = gate.chunk(4, -1)
        twice = torch.addcmul(f * twice, i, torch.add(shifts[1], g, alpha=4), out=cs[:, t + 1])
        bent = torch.add(shifts[0], twice.sigmoid(), alpha=2, out=bents[:, t])
        before = torch.mul(o, bent, out=hs[:, t + 1])
    return [hs, cs, bents, z]


def _doubled(part: Tensor, width: int) -> Tensor:
    """[J, 4H, ...] with the rows of gate g doubled."""
    found = part.clone()
    found[:, 2 * width : 3 * width] *= 2
    return found


def _backward(dh: Tensor, dc: Tensor, x: Tensor, w: Tensor, v: Tensor, hs: Tensor, cs: Tensor, bents: Tensor, gates: Tensor) -> list[Tensor]:  # fmt: skip # noqa: E501
    """From the gradients in all h and in the last c to those in x, h_0, c_0, W, V and b."""
    _, times, _, width = bents.shape
    i, f, g, o = gates.chunk(4, -1)
    factors = torch.addcmul(gates, gates, gates, value=-1).unflatten(-1, (4, width))  # slopes of the four sigmoids
    factors[..., 0, :] *= torch.add(g.new_full((), -1.0), g, alpha=2)
    factors[..., 1, :] *= cs[:, :-1]
    factors[..., 1, :] *= 0.5  # cs is 2 c
    factors[..., 2, :] *= 4.0  # the slope of tanh is four times that of the sigmoid
    factors[..., 2, :] *= i
    factors[..., 3, :] *= bents
    into = torch.addcmul(o, o, bents * bents, value=-1)
    dz, back, flat = factors, torch.zeros_like(dh[:, 0]), factors.flatten(-2)
    for t in range(times - 1, -1, -1):
        here = dh[:, t] + back
        dc = torch.addcmul(dc, here, into[:, t])
        dz[:, t, :, :3] *= dc.unsqueeze(2)
        dz[:, t, :, 3] *= here
        back = torch.bmm(flat[:, t], v)
        dc = dc * f[:, t]
    rows = flat.flatten(1, 2)
    dw, dv = rows.mT @ x.flatten(1, 2), rows.mT @ hs[:, :-1].flatten(1, 2)
    return [(rows @ w).view(x.shape), back, dc, dw, dv, rows.sum(1)]


forward = operator("lstm", _forward, 6)
backward = operator("lstm_backward", _backward, 9)


class Layer(Function):
    """One layer in one direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, c: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Outputs:
        hs, cs, bents, gates = forward(x, h, c, w, v, b)
        ctx.save_for_backward(x, w, v, hs, cs, bents, gates)
        return hs[:, 1:].clone(), cs[:, -1] / 2  # what is saved is not what a model may write into

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Outputs:
        return tuple(backward(grads[0], grads[1], *ctx.saved_tensors))
