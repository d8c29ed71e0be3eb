"""GIANT: Wang, Roosta, Xu and Mahoney, GIANT: Globally Improved Approximate Newton Method for Distributed Optimization,
NeurIPS 2018."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedge import tree
from fedge.algorithms.local_newton import LocalNewton, Times
from fedge.core import Carry, Params


@dataclass(frozen=True, eq=False)
class GIANT(LocalNewton):
    """The mean over clients of H_k^{-1} g, each by conjugate gradients: Newton with the harmonic mean of the Hessians.

        g_t     = sum_k n_k grad F_k(w_t) / sum_k n_k + weight_decay w_t
        p_k     = (H_k + (weight_decay + damping) I)^{-1} g_t  by `iterations` of conjugate gradients from 0
        w_{t+1} = w_t - lr sum_k n_k p_k / sum_k n_k

    H_k is the Gauss-Newton matrix of all of client k's examples at w_t (`matrix="fisher"`: the empirical Fisher
    matrix). It is the Hessian for softmax regression, the paper's case, and positive semi-definite for every network.
    One iteration is one product over all examples in one batch. The paper needs many examples per client, so that every
    H_k is near the mean. `damping`, which the paper does not have, keeps steps short if clients have few examples.
    `candidates`: the cohort is asked for its loss at w_t - a lr p for each a, and the best is taken, 0 being no step;
    with none, a is 1. (The paper takes the longest that passes Armijo's test.)

    The record of a round has `cos_step` = cos(p, g) and `length_step` = |p| / |g|.

    Bytes per round, d parameters of b bytes, cohort c: down 2 c d b, up 2 c (d b + 4); with q candidates also
    down c d b, up c (q b + 4).
    """

    def begin(self, g: Params) -> Carry:
        return {"x": tree.zeros_like(g), "r": g, "v": g, "rr": tree.dot(g, g)}

    def improve(self, g: Params, carry: Carry, times: Times) -> Carry:
        v, rr = carry["v"], carry["rr"]
        curved = times(v)
        length = _ratio(rr, tree.dot(v, curved))
        r = tree.axpy(-length, curved, carry["r"])
        after = tree.dot(r, r)
        turned = tree.axpy(_ratio(after, rr), v, r)
        return {"x": tree.axpy(length, v, carry["x"]), "r": r, "v": turned, "rr": after}

    def solution(self, carry: Carry) -> Params:
        x: Params = carry["x"]
        return x


def _ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a / b, and 0 where b is not positive: the residual is zero, or the direction has no curvature."""
    return torch.where(b > 0, a / torch.where(b > 0, b, 1.0), 0.0)
