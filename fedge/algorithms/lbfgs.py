"""L-BFGS on the server: the memory of curvature pairs and the vector-free two-loop recursion.

Nocedal, Updating quasi-Newton matrices with limited storage, 1980; Chen, Wang and Zhou, Large-scale L-BFGS using
MapReduce, NIPS 2014.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedge import tree
from fedge.core import Params

Pair = tuple[Params, Params]


def is_safe(pair: Pair, floor: float) -> bool:
    """Whether s.y > floor * s.s > 0: the pair then keeps the inverse Hessian positive definite."""
    s, y = pair
    curvature, length = float(tree.dot(s, y)), float(tree.dot(s, s))
    return math.isfinite(curvature) and math.isfinite(length) and length > 0 and curvature > floor * length


def compared(a: Params, b: Params) -> tuple[float, float]:
    """cos(a, b) and |b| / |a|: 1 and any constant mean that b is a multiple of a. Zero vectors give NaN."""
    both, squared, other = (float(tree.dot(*two)) for two in ((a, b), (a, a), (b, b)))
    if min(squared, other) <= 0:
        return math.nan, math.nan
    a_long, b_long = math.sqrt(squared), math.sqrt(other)  # of the product, an underflow would be a division by zero
    return both / a_long / b_long, b_long / a_long


def named_shape(what: str, a: Params, b: Params) -> dict[str, float]:
    """`compared` for the record of a round; nothing if one of them is zero or not finite."""
    found = compared(a, b)
    return dict(zip((f"cos_{what}", f"length_{what}"), found, strict=True)) if all(map(math.isfinite, found)) else {}


def direction(pairs: list[Pair], g: Params) -> Params:
    """-H g, with H the L-BFGS inverse Hessian of the pairs (oldest first) and H_0 = (s.y / y.y) I of the newest.

    Vector-free: H g is a combination of the 2m + 1 vectors {s_i}, {y_i}, g, and the recursion needs nothing of them
    but their (2m + 1)^2 dot products, which is where the m^2 of Theorem 3 comes from.
    """
    basis = [s for s, _ in pairs] + [y for _, y in pairs] + [g]
    return combine(basis, -two_loop(gram(basis)))


def gram(basis: list[Params]) -> Tensor:
    """All dot products, [n, n], summed in float64."""
    total = torch.zeros(len(basis), len(basis), dtype=torch.float64)
    for name in basis[0]:
        rows = torch.stack([vector[name].flatten() for vector in basis]).double()
        total += (rows @ rows.mT).cpu()
    return total


def two_loop(dots: Tensor) -> Tensor:
    """The coefficients of H g in the basis {s_1..s_m, y_1..y_m, g}, from its Gram matrix alone."""
    m = (len(dots) - 1) // 2
    coefficients = torch.zeros(len(dots), dtype=dots.dtype)
    coefficients[-1] = 1.0
    alpha = [0.0] * m
    for i in reversed(range(m)):
        alpha[i] = float(dots[i] @ coefficients / dots[i, m + i])
        coefficients[m + i] -= alpha[i]
    if m:
        coefficients *= dots[m - 1, 2 * m - 1] / dots[2 * m - 1, 2 * m - 1]
    for i in range(m):
        beta = float(dots[m + i] @ coefficients / dots[i, m + i])
        coefficients[i] += alpha[i] - beta
    return coefficients


def combine(basis: list[Params], coefficients: Tensor) -> Params:
    """sum_j c_j b_j."""
    total = tree.scale(float(coefficients[0]), basis[0])
    for c, vector in zip(coefficients[1:].tolist(), basis[1:], strict=True):
        total = tree.axpy(c, vector, total)
    return total
