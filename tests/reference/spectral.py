"""Spectral steps by a singular value decomposition, in the manner of torch.optim."""

import torch
from torch import Tensor, nn


def polynomial(s: Tensor, iterations: int = 5) -> Tensor:
    for _ in range(iterations):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


def turned(matrix: Tensor, iterations: int = 5) -> Tensor:
    """U p(S / |S|) V^T, of a weight [out, ...]."""
    u, s, vt = torch.linalg.svd(matrix.reshape(len(matrix), -1), full_matrices=False)
    return (u @ torch.diag(polynomial(s / s.norm(), iterations)) @ vt).reshape(matrix.shape)


MINIMAX = ((7.8118, -21.107, 14.4192), (3.5812, -2.4907, 0.4527), (2.7615, -1.9454, 0.4051))


def turned_in_three(matrix: Tensor) -> Tensor:
    """U p3(p2(p1(S / (sum S^4)^(1/4)))) V^T, of a weight [out, ...]."""
    u, s, vt = torch.linalg.svd(matrix.reshape(len(matrix), -1), full_matrices=False)
    s = s / (s**4).sum() ** 0.25
    for a, b, c in MINIMAX:
        s = a * s + b * s**3 + c * s**5
    return (u @ torch.diag(s) @ vt).reshape(matrix.shape)


def has_axes(params: list[nn.Parameter]) -> list[int]:
    return [i for i, param in enumerate(params) if param.dim() >= 2]


class LocalSpectral:
    """Nesterov momentum, all weights but the last turned; param_groups[0]["factor"] shrinks every step."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0, turn=turned
    ) -> None:
        self.turn = turn
        self.params, self.lr, self.momentum, self.weight_decay = params, lr, momentum, weight_decay
        self.buffers = [torch.zeros_like(param) for param in params]
        self.factor = 1.0

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        matrices = has_axes(self.params)[:-1]
        for i, param in enumerate(self.params):
            self.buffers[i] = self.momentum * self.buffers[i] + param.grad
            n = self.momentum * self.buffers[i] + param.grad
            param -= self.factor * self.lr * self.weight_decay * param
            if i in matrices:
                rows, columns = len(n), n.numel() // len(n)
                param -= self.factor * self.lr * max(1.0, rows / columns) ** 0.5 * self.turn(n)
            else:
                param -= self.factor * 0.1 * (1 - self.momentum) * n


def server_step(m: list[Tensor], momentum: float, lr: float) -> list[Tensor]:
    """What is subtracted from the parameters: every matrix of m turned and as long as before."""
    found = []
    for one in m:
        step = one
        if one.dim() >= 2:
            step = turned(one)
            step = step * one.norm() / step.norm()
        found.append(lr * (1 - momentum) * step)
    return found
