"""Networks of the workloads that are not chains: a residual net with group norm, recurrent nets, a transformer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, TIMES = 80, 20


class Block(nn.Module):
    """Two convolutions with group norm beside a shortcut (He et al., CVPR 2016; Wu and He, ECCV 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)
        same = inputs == outputs and stride == 1
        self.short = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.short(x))


class ResNet(nn.Module):
    """`depth` blocks per width; (64, 128, 256, 512) and 2 are ResNet-18 for pictures of 32 x 32."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64), depth: int = 1, outputs: int = 10) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.GroupNorm(8, widths[0])
        pairs = [(a, b, s) for a, b, s in zip((widths[0], *widths), widths, (1, *[2] * len(widths)), strict=False)]
        blocks = [Block(a if d == 0 else b, b, s if d == 0 else 1) for a, b, s in pairs for d in range(depth)]
        self.blocks, self.out = nn.Sequential(*blocks), nn.Linear(widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        found: Tensor = self.out(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return found


class Reader(nn.Module):
    """Characters, embedded and read by two recurrent layers; the next one is predicted."""

    def __init__(self, kind: Any = nn.LSTM, hidden: int = 64) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(WORDS, 8), kind(8, hidden, 2, batch_first=True)
        self.out = nn.Linear(hidden, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.rnn(self.embed(x))[0][:, -1])
        return found


class Transformer(nn.Module):
    """An encoder of `layers` layers on embedded characters."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, width), nn.Parameter(torch.zeros(TIMES, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.encoder(self.embed(x) + self.place).mean(1))
        return found
