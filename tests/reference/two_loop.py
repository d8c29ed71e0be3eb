"""The L-BFGS inverse Hessian (Nocedal 1980), as the two-loop recursion and as a dense matrix.

`pairs` lists (s, y), oldest first, and is not empty. H_0 = (s.y / y.y) I of the newest pair.
"""

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def two_loop(pairs: list[Pair], g: Tensor) -> Tensor:
    """H g by the ordinary recursion."""
    q = g.clone()
    alphas = []
    for s, y in reversed(pairs):
        alpha = (s @ q) / (s @ y)
        q = q - alpha * y
        alphas.append(alpha)
    s, y = pairs[-1]
    r = (s @ y) / (y @ y) * q
    for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
        beta = (y @ r) / (s @ y)
        r = r + (alpha - beta) * s
    return r


def dense_bfgs(pairs: list[Pair]) -> Tensor:
    """H <- (I - rho s y^T) H (I - rho y s^T) + rho s s^T over the pairs, from H_0."""
    s, y = pairs[-1]
    eye = torch.eye(len(s), dtype=s.dtype)
    h = (s @ y) / (y @ y) * eye
    for s, y in pairs:
        rho = 1 / (s @ y)
        left = eye - rho * torch.outer(s, y)
        h = left @ h @ left.T + rho * torch.outer(s, s)
    return h
