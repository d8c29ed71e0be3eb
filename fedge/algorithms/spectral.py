"""Spectral steps: every weight matrix moves along U V^T of its momentum.

Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; as Kronecker-factored curvature, Gupta,
Koren and Singer, Shampoo: Preconditioned Stochastic Tensor Optimization, ICML 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fedge import tree
from fedge.checks import at_least_one, choice, non_negative, positive, unit_interval
from fedge.core import Params

QUINTIC = (3.4445, -4.7750, 2.0315)  # a, b, c of Jordan et al.
# The three quintics whose composition is nearest to 1 on [0.01, 1]: each is the best one for the interval into which
# the one before maps, widened by 4 % at both ends against rounding (Amsel et al., The Polar Express, 2025).
MINIMAX = ((7.8118, -21.107, 14.4192), (3.5812, -2.4907, 0.4527), (2.7615, -1.9454, 0.4051))

Products = Literal["auto", "same", "bf16"]
Quintics = Literal["jordan", "minimax"]
WIDE, TOGETHER = 2, 3  # columns per row from which so many iterations are done on the small side at once


def orthogonal(matrix: Tensor, iterations: int = 5, products: Products = "same") -> Tensor:
    """Nearly U V^T of M = U S V^T, [rows, columns], by Newton-Schulz steps: matrix products only.

        X <- M / |M|_F;  repeatedly  G = X X^T,  X <- (a I + b G + c G^2) X

    G is taken on the smaller side. Singular vectors stay as they are and every singular value s in (0, 1] moves by
    s <- a s + b s^3 + c s^5. After five steps those above 0.0015 of |M|_F lie in [0.67, 1.21], smaller ones at about
    485 times themselves; a matrix of zeros stays zero.

    With twice as many columns as rows, up to three steps in a row are one polynomial P in G, worked out on the small
    side: X <- P X. More at once would let rounding in G drown small singular values. X itself keeps its precision:
    a matrix of low rank, as after the first steps, keeps its rank. With X in bfloat16, noise would fill the rest.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.mT if tall else matrix
    x = x / torch.linalg.vector_norm(x).clamp(min=torch.finfo(x.dtype).tiny)
    small = torch.bfloat16 if in_halves(x, products) else x.dtype
    most = TOGETHER if x.shape[1] >= WIDE * x.shape[0] else 1
    for done in range(0, iterations, most):
        low = x.to(small)
        x = polynomial(low @ low.mT, min(most, iterations - done)).to(x.dtype) @ x
    return x.mT if tall else x


def polynomial(gram: Tensor, steps: int) -> Tensor:
    """P with X_steps = P X_0, from G_0 = X_0 X_0^T: Q = a I + b G + c G^2,  P <- Q P,  G <- Q G Q."""
    a, b, c = QUINTIC
    one = torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
    whole = q = a * one + b * gram + c * (gram @ gram)
    for _ in range(steps - 1):
        gram = q @ gram @ q
        q = a * one + b * gram + c * (gram @ gram)
        whole = q @ whole
    return whole


def orthogonal_in_three(matrix: Tensor, products: Products = "same") -> Tensor:
    """Nearly U V^T of M by three quintics of their own, with two products on the long side.

        X <- M / |M M^T|_F^(1/2),   G = X X^T,   X <- P(G) X

    No singular value is above that norm, and most come nearer to 1 than with |M|_F. Those above 0.01 of it end in
    [0.65, 1.35], smaller ones at 77 times themselves; in bfloat16 up to 1.9 where a matrix is small, up to
    1.4 for 512 x 1568. For r rows and c >= r columns 4 r^2 c + 18 r^3 operations.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.mT if tall else matrix
    tiny = torch.finfo(x.dtype).tiny
    x = x / torch.linalg.vector_norm(x).clamp(min=tiny)
    small = torch.bfloat16 if in_halves(x, products) else x.dtype
    gram = _times(x, x.mT, small)
    length = torch.linalg.vector_norm(gram).clamp(min=tiny)
    x = _minimax(gram / length, small) @ x / length.sqrt()
    return x.mT if tall else x


def _minimax(gram: Tensor, small: torch.dtype) -> Tensor:
    """P(G): as `polynomial`, with sums in the parameters' precision, since large coefficients cancel in them."""
    one = torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
    whole = q = one
    for place, (a, b, c) in enumerate(MINIMAX):
        if place:
            gram = _times(_times(q, gram, small), q, small)
        q = a * one + b * gram + c * _times(gram, gram, small)
        whole = _times(q, whole, small) if place else q
    return whole


def _times(a: Tensor, b: Tensor, small: torch.dtype) -> Tensor:
    return (a.to(small) @ b.to(small)).to(a.dtype)


def in_halves(x: Tensor, products: Products) -> bool:
    """Whether G and P are in bfloat16: "auto" on a GPU, where the run's precision is not fp32."""
    reduced = x.is_cuda and x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return products == "bf16" or (products == "auto" and reduced)


def matrices(params: Params, last_layer: bool) -> list[str]:
    """The parameters that take spectral steps: those with two or more axes; the last one only with `last_layer`."""
    found = [name for name, leaf in params.items() if leaf.ndim >= 2]
    return found if last_layer else found[:-1]


@dataclass(frozen=True)
class Spectral:
    """v <- beta v + g,  n = beta v + g (`nesterov`) or v;  w <- w - size * U V^T of n, for every matrix n = U S V^T.

    Why: U V^T = (n n^T)^(-1/4) n (n^T n)^(-1/4), which is Shampoo's step with the Kronecker factors of this one matrix,
    and so a step by its Kronecker-factored empirical Fisher, without an accumulation. All directions of a layer's
    input and output move equally far, however small their singular values.

    A parameter with two or more axes is a matrix: a weight [out, ...] is taken as [out, rest]. The last of them is the
    output layer's weight and moves as vectors do unless `last_layer` is set. `orthogonal` computes U V^T, in
    `iterations` steps.

        scale "shape": a matrix moves by lr sqrt(max(1, rows / columns)) U V^T
        scale "norm":  a matrix moves by lr (1 - beta) |n|_F U V^T / |U V^T|_F, as far as n itself would
        the rest moves by vector_lr (1 - beta) n, or by lr (1 - beta) n if vector_lr is None

    `weight_decay` is separate from the gradient, whose length does not matter: w <- (1 - lr weight_decay) w first.
    "shape" is for the steps of clients, "norm" for a server's step along the mean update (`Spectral.server`).

    `products` "bf16" computes the polynomial in M M^T in bfloat16, with sums in float32; singular values then end in
    [0.66, 1.25]. "same" keeps the parameters' precision. "auto" is bf16 where the engine's precision on a GPU is tf32
    or bf16, and otherwise the parameters'. Momentum, parameters and the product with M keep their precision.

    Cost of a step beside the gradient's: for r rows, c >= r columns, iterations * (4 r^2 c + 2 r^3) operations; with
    c >= 2 r and five iterations 8 r^2 c + 28 r^3. `quintics` "minimax": 4 r^2 c + 18 r^3 for three iterations that are
    all different; singular values end in [0.65, 1.35], and small ones grow less (`orthogonal_in_three`).
    Bytes: none; with FedAvg's `carry_momentum` v travels, one more d down and up.
    """

    momentum: float = 0.95
    nesterov: bool = True
    scale: Literal["shape", "norm"] = "shape"
    vector_lr: float | None = 0.1
    last_layer: bool = False
    iterations: int = 5
    weight_decay: float = 0.0
    products: Products = "same"
    quintics: Quintics = "jordan"

    def __post_init__(self) -> None:
        unit_interval("momentum", self.momentum)
        choice("scale", self.scale, ("shape", "norm"))
        positive("vector_lr", self.vector_lr, optional=True)
        at_least_one("iterations", self.iterations)
        choice("products", self.products, get_args(Products))
        choice("quintics", self.quintics, get_args(Quintics))
        if self.quintics == "minimax" and self.iterations != Spectral.iterations:
            raise ValueError(f"iterations is {self.iterations}, but minimax has three of its own: leave it at 5")
        non_negative("weight_decay", self.weight_decay)

    @classmethod
    def fast(cls, momentum: float = 0.95, weight_decay: float = 0.0) -> Spectral:
        """The cheapest form of a client's step: three iterations, and their products in bfloat16 on a GPU with TF32."""
        return cls(momentum, weight_decay=weight_decay, products="auto", quintics="minimax")

    @classmethod
    def server(cls, momentum: float = 0.5) -> Spectral:
        """m <- mu m - mean update; every matrix becomes U V^T at m's length, and all moves by server_lr (1 - mu)."""
        return cls(momentum, nesterov=False, scale="norm", vector_lr=None, last_layer=True)

    def start(self, params: Params) -> dict[str, Params | Tensor]:
        return {"v": tree.zeros_like(params)} if self.momentum else {}

    def step(
        self, params: Params, grad: Params, state: dict[str, Params | Tensor], lr: float, factor: Tensor | None = None
    ) -> tuple[Params, dict[str, Params | Tensor]]:
        v, state = self._accumulated(grad, state)
        n = tree.axpy(self.momentum, v, grad) if self.nesterov and self.momentum else v
        turned = matrices(params, self.last_layer)
        moved = {}
        for name, leaf in params.items():
            size, along = self._matrix(n[name], lr) if name in turned else self._vector(n[name], lr)
            if self.weight_decay:
                along = torch.add(along, leaf, alpha=lr * self.weight_decay / size)
            moved[name] = torch.add(leaf, along if factor is None else factor * along, alpha=-size)
        return moved, state

    def _accumulated(
        self, grad: Params, state: dict[str, Params | Tensor]
    ) -> tuple[Params, dict[str, Params | Tensor]]:
        if not self.momentum:
            return grad, state
        v = tree.axpy(self.momentum, state["v"], grad)  # type: ignore[arg-type]
        return v, {"v": v}

    def _matrix(self, n: Tensor, lr: float) -> tuple[float, Tensor]:
        """The step size and the direction."""
        flat = n.flatten(1)
        if self.quintics == "minimax":
            along = orthogonal_in_three(flat, self.products)
        else:
            along = orthogonal(flat, self.iterations, self.products)
        if self.scale == "shape":
            return lr * max(1.0, flat.shape[0] / flat.shape[1]) ** 0.5, along.reshape(n.shape)
        length = torch.linalg.vector_norm(along).clamp(min=torch.finfo(n.dtype).tiny)
        return lr * (1 - self.momentum), (along * (torch.linalg.vector_norm(flat) / length)).reshape(n.shape)

    def _vector(self, n: Tensor, lr: float) -> tuple[float, Tensor]:
        return (lr if self.vector_lr is None else self.vector_lr) * (1 - self.momentum), n
