"""Curvature without matrices: the Fisher diagonal, and products with the Fisher and the Gauss-Newton matrix."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from fedge.core import Params
from fedge.handle.fisher_diagonal import Squares

Losses = Callable[[Params], Tensor]  # params -> [B]

_ONE_AT_A_TIME = threading.RLock()  # torch's forward mode has one state for all threads


def sum_sq_grad(losses: Losses, params: Params, separable: list[str]) -> Params:
    """sum_i (d loss_i / d w)^2, exactly.

    Weights that a layer with a rule uses once get it in one backward pass (see `fisher_diagonal`); the others from one
    gradient per example.
    """
    fast = {name: params[name] for name in separable}
    rest = {name: leaf for name, leaf in params.items() if name not in fast}
    found = in_one_pass(losses, fast, rest) if fast else {}
    if rest:
        found |= _one_by_one(losses, rest, fast)
    return {name: found[name] for name in params}


def in_one_pass(losses: Losses, fast: Params, rest: Params) -> Params:
    def total(fast: Params) -> Tensor:
        with Squares(fast):
            return losses(fast | rest).sum()

    squares: Params = torch.func.grad(total)(fast)
    return squares


def _one_by_one(losses: Losses, rest: Params, fast: Params) -> Params:
    values, back = _vjp(lambda rest: losses(rest | fast), rest)

    def square(cotangent: Tensor) -> Params:
        return {name: leaf * leaf for name, leaf in back(cotangent).items()}

    one_hot = torch.eye(len(values), dtype=values.dtype, device=values.device)
    return {name: leaf.sum(0) for name, leaf in vmap(square)(one_hot).items()}


def sum_fisher_product(losses: Losses, params: Params, v: Params) -> Params:
    """sum_i g_i (g_i . v): the slopes g_i . v by one forward-mode pass, their combination by one backward pass."""
    return _vjp(losses, params)[1](_jvp(losses, params, v)[1])


def sum_gauss_newton_product(
    logits: Callable[[Params], Tensor], total: Callable[[Tensor], Tensor], params: Params, v: Params
) -> Params:
    """sum_i J_i^T H_i J_i v, with J_i the Jacobian of example i's logits and H_i the Hessian of its loss in them."""
    z, along = _jvp(logits, params, v)
    _, curved = _jvp(torch.func.grad(total), z, along)
    return _vjp(logits, params)[1](curved)


def sum_squared_slope_product(
    logits: Callable[[Params], Tensor], total: Callable[[Tensor], Tensor], params: Params, v: Params
) -> Params:
    """sum_i J_i^T diag(r_i^2) J_i v, with J_i the Jacobian of example i's logits and r_i its loss's slopes in them."""
    z, along = _jvp(logits, params, v)
    slopes = torch.func.grad(total)(z)
    return _vjp(logits, params)[1](slopes * slopes * along)


def fisher_in_span(losses: Losses, params: Params, basis: list[Params]) -> tuple[Tensor, Tensor]:
    """V^T sum_i g_i, [k], and V^T (sum_i g_i g_i^T) V, [k, k]: one forward-mode pass per vector, no backward pass."""
    slopes = torch.stack([_jvp(losses, params, v)[1] for v in basis])  # [k, B]
    return slopes.sum(1), slopes @ slopes.mT


def gauss_newton_in_span(
    logits: Callable[[Params], Tensor], total: Callable[[Tensor], Tensor], params: Params, basis: list[Params]
) -> tuple[Tensor, Tensor]:
    """V^T sum_i g_i, [k], and V^T (sum_i J_i^T H_i J_i) V, [k, k]: one forward-mode pass per vector."""
    moved = [_jvp(logits, params, v) for v in basis]
    z, slope = moved[0][0], torch.func.grad(total)
    along = torch.stack([one for _, one in moved])  # [k, B, C]
    curved = torch.stack([_jvp(slope, z, one)[1] for one in along.unbind()])
    return along.flatten(1) @ slope(z).flatten(), along.flatten(1) @ curved.flatten(1).mT


def _jvp(function: Callable[[Any], Tensor], at: Any, along: Any) -> tuple[Tensor, Tensor]:
    with _ONE_AT_A_TIME:
        value, slope = jvp(function, (at,), (along,))[:2]
    return value, slope


def _vjp(function: Callable[[Params], Tensor], at: Params) -> tuple[Tensor, Callable[[Tensor], Params]]:
    value, back = vjp(function, at)[:2]
    return value, lambda cotangent: back(cotangent)[0]
