"""Shampoo and SOAP at a server, in NumPy: one object per run, told one mean update per round."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Matrix = NDArray[np.float64]


def power(factor: Matrix, exponent: float, eps: float = 1e-6) -> Matrix:
    """A power by a singular value decomposition; of a positive semidefinite matrix that is its eigendecomposition."""
    u, s, _ = np.linalg.svd(factor)
    return u @ np.diag((s + eps * s[0]) ** exponent) @ u.T


class Server:
    """`step` takes the gradient's tensors in order and gives what is subtracted from the parameters."""

    def __init__(self, kind: str, momentum: float, beta: float, largest: int = 1024) -> None:
        self.kind, self.momentum, self.beta, self.largest = kind, momentum, beta, largest
        self.m: list[Tensor] | None = None
        self.kept: dict[int, dict[str, Matrix]] = {}

    def step(self, grads: list[Tensor], lr: float) -> list[Tensor]:
        self.m = [self.momentum * m + g for m, g in zip(self.m or [0.0] * len(grads), grads, strict=True)]
        found = []
        for i, (g, m) in enumerate(zip(grads, self.m, strict=True)):
            along = m
            sides = [axis for axis, n in enumerate((len(g), g.numel() // len(g))) if n <= self.largest]
            if g.dim() >= 2 and sides:
                flat = g.reshape(len(g), -1).numpy(), m.reshape(len(m), -1).numpy()
                turned = getattr(self, self.kind)(self.kept.setdefault(i, {}), sides, *flat)
                turned *= np.sqrt((flat[1] ** 2).sum() / (turned**2).sum())
                along = torch.from_numpy(turned).reshape(m.shape)
            found.append(lr * (1 - self.momentum) * along)
        return found

    def average(self, kept: dict[str, Matrix], name: str, new: Matrix) -> Matrix:
        kept[name] = self.beta * kept.get(name, np.zeros_like(new)) + (1 - self.beta) * new
        return kept[name]

    def shampoo(self, kept: dict[str, Matrix], sides: list[int], g: Matrix, m: Matrix) -> Matrix:
        exponent = -0.25 if len(sides) == 2 else -0.5
        if 0 in sides:
            m = power(self.average(kept, "L", g @ g.T), exponent) @ m
        return m @ power(self.average(kept, "R", g.T @ g), exponent) if 1 in sides else m

    def soap(self, kept: dict[str, Matrix], sides: list[int], g: Matrix, m: Matrix) -> Matrix:
        turns = [np.eye(n) for n in g.shape]
        for axis, square in enumerate((g @ g.T, g.T @ g)):
            if axis in sides:
                factor = self.average(kept, f"factor {axis}", square)
                before = kept.get(f"basis {axis}")
                turned = np.linalg.svd(factor)[0] if before is None else np.linalg.qr(factor @ before)[0]
                turns[axis] = kept[f"basis {axis}"] = turned
        p, q = turns
        squares = self.average(kept, "squares", (p.T @ g @ q) ** 2)
        return p @ ((p.T @ m @ q) / np.sqrt(squares + 1e-6 * squares.max())) @ q.T
