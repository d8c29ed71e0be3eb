"""Accumulated Kronecker factors at the server: Shampoo and SOAP along the mean update.

Gupta, Koren and Singer, Shampoo: Preconditioned Stochastic Tensor Optimization, ICML 2018; Vyas et al., SOAP: Improving
and Stabilizing Shampoo using Adam, ICLR 2025.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedge import tree
from fedge.checks import at_least_one, positive, unit_interval
from fedge.core import Params

Moments = dict[str, Params | Tensor]
Kept = dict[str, Tensor]  # what the server keeps of one matrix, in float64
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class _Factored:
    """Fields and steps that Shampoo and SOAP share; a matrix is a parameter with two or more axes, as [out, rest]."""

    momentum: float = 0.5
    beta: float = 0.9
    eps: float = 1e-6
    largest_side: int = 2048

    def __post_init__(self) -> None:
        unit_interval("momentum", self.momentum)
        unit_interval("beta", self.beta)
        positive("eps", self.eps)
        at_least_one("largest_side", self.largest_side)

    def start(self, params: Params) -> Moments:
        kept = {name: self._empty(leaf.flatten(1)) for name, leaf in params.items() if leaf.ndim >= 2}
        return {"v": tree.zeros_like(params), **{f"of {name}": one for name, one in kept.items() if one}}

    def step(
        self, params: Params, grad: Params, state: Moments, lr: float, factor: Tensor | None = None
    ) -> tuple[Params, Moments]:
        v = tree.axpy(self.momentum, state["v"], grad)  # type: ignore[arg-type]
        along, kept = dict(v), {}
        for name in [name for name in params if f"of {name}" in state]:
            matrices = (grad[name].flatten(1).double(), v[name].flatten(1).double())
            kept[f"of {name}"], found = self._turned(state[f"of {name}"], *matrices)  # type: ignore[arg-type]
            along[name] = as_long_as(matrices[1], found).to(v[name].dtype).reshape(v[name].shape)
        if factor is not None:
            along = tree.scale(factor, along)
        return tree.axpy(-lr * (1 - self.momentum), along, params), {"v": v, **kept}

    def _empty(self, matrix: Tensor) -> Kept:
        """Factors of zeros for the sides that are short enough."""
        sides = {side: n for side, n in zip(("rows", "columns"), matrix.shape, strict=True) if n <= self.largest_side}
        return {side: matrix.new_zeros((n, n), dtype=torch.float64) for side, n in sides.items()}

    def _turned(self, kept: Kept, grad: Tensor, m: Tensor) -> tuple[Kept, Tensor]:
        """What is kept after this gradient, and the direction of m's step."""
        raise NotImplementedError

    def _factors(self, kept: Kept, grad: Tensor) -> Kept:
        squares = {"rows": lambda: grad @ grad.mT, "columns": lambda: grad.mT @ grad}
        return {side: torch.lerp(squares[side](), kept[side], self.beta) for side in squares if side in kept}


@dataclass(frozen=True)
class Shampoo(_Factored):
    """Steps along L^(-1/4) m R^(-1/4), with Kronecker factors L and R that are averaged over the rounds.

    For every matrix G of the gradient g, which at a server is the negative mean update:

        m <- mu m + g,   L <- beta L + (1 - beta) G G^T,   R <- beta R + (1 - beta) G^T G
        every matrix moves by lr (1 - mu) |m|_F D / |D|_F,  D = L^(-1/4) m R^(-1/4): as far as m itself would
        the rest moves by lr (1 - mu) m

    L^(1/2) and R^(1/2) are the Kronecker factors of the layer's empirical Fisher matrix E vec(G) vec(G)^T, and the step
    is by its inverse square root. With mu = beta = 0 the factors are those of this one matrix, and D = U V^T is the
    spectral step (`Spectral.server`). A direction that is small in every round deserves a longer step; one that is
    small in this cohort by chance does not. Averages over rounds tell them apart.

    A side longer than `largest_side` has no factor, and the other one's exponent is -1/2, which gives U V^T as well. If
    both sides are too long, the matrix moves as the rest does. `eps` times the largest eigenvalue is added to all
    eigenvalues; a large eps gives m itself. The length of D does not matter, so the averages need no correction for
    their start at zero. Roots are eigendecompositions in float64: a step for a server, not for a device.

    Bytes: none. The server keeps m and, per matrix [r, c], r^2 + c^2 numbers of 8 bytes.
    """

    def _turned(self, kept: Kept, grad: Tensor, m: Tensor) -> tuple[Kept, Tensor]:
        factors = self._factors(kept, grad)
        power = -1 / (2 * len(factors))
        if "rows" in factors:
            m = root(factors["rows"], power, self.eps) @ m
        return factors, m @ root(factors["columns"], power, self.eps) if "columns" in factors else m


@dataclass(frozen=True)
class SOAP(_Factored):
    """Adam in the eigenbases P, Q of Shampoo's factors L and R, with m, L and R as there.

        V <- beta V + (1 - beta) (P^T G Q)^2,   D = P (P^T m Q / sqrt(V + eps max V)) Q^T
        every matrix moves by lr (1 - mu) |m|_F D / |D|_F,  the rest by lr (1 - mu) m

    Shampoo gives the entry (i, j) in the eigenbases a curvature that is a product of one number for i and one for j.
    Here the curvature of each entry is measured. The first bases are those of the first factors. Then P becomes the
    orthogonal factor of L P, a step of the power iteration. It turns slowly, so that V stays meaningful. The basis is
    arbitrary where a factor has rank too low, as R of a wide matrix in the first rounds. A side longer than
    `largest_side` keeps its own axes.

    Bytes: none. The server keeps m and, per matrix [r, c], 2 r^2 + 2 c^2 + r c numbers of 8 bytes.
    """

    def _empty(self, matrix: Tensor) -> Kept:
        factors = super()._empty(matrix)
        bases = {f"basis of {side}": torch.zeros_like(one) for side, one in factors.items()}
        return {**factors, **bases, "squares": torch.zeros_like(matrix, dtype=torch.float64)} if factors else {}

    def _turned(self, kept: Kept, grad: Tensor, m: Tensor) -> tuple[Kept, Tensor]:
        factors = self._factors(kept, grad)
        bases = {f"basis of {side}": basis(one, kept[f"basis of {side}"]) for side, one in factors.items()}
        p, q = bases.get("basis of rows"), bases.get("basis of columns")
        squares = torch.lerp(rotated(p, grad, q).square(), kept["squares"], self.beta)
        along = rotated(p, m, q) / (squares + self.eps * squares.max()).clamp(min=TINY).sqrt()
        found = rotated(None if p is None else p.mT, along, None if q is None else q.mT)
        return {**factors, **bases, "squares": squares}, found


def root(factor: Tensor, power: float, eps: float) -> Tensor:
    """(F + eps |F| I)^power of a positive semidefinite F, |F| its largest eigenvalue."""
    values, vectors = torch.linalg.eigh(factor)
    raised = (values.clamp(min=0) + eps * values[-1]).clamp(min=TINY) ** power
    found: Tensor = (vectors * raised) @ vectors.mT
    return found


def basis(factor: Tensor, before: Tensor) -> Tensor:
    """Eigenvectors at first, when there is no basis yet; then one step of the power iteration from the last."""
    found: Tensor
    if not bool(before.any()):
        found = torch.linalg.eigh(factor).eigenvectors.flip(1)
    else:
        found = torch.linalg.qr(factor @ before).Q
    return found


def rotated(p: Tensor | None, matrix: Tensor, q: Tensor | None) -> Tensor:
    """P^T M Q; None is the identity."""
    matrix = matrix if p is None else p.mT @ matrix
    return matrix if q is None else matrix @ q


def as_long_as(m: Tensor, direction: Tensor) -> Tensor:
    norm: Callable[[Tensor], Tensor] = torch.linalg.vector_norm
    return direction * (norm(m) / norm(direction).clamp(min=TINY))
