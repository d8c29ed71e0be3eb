"""Networks that are not chains, small, and examples for them: every part that has a batched rule is in one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedge
from tests.cases import generator

WORDS, TIMES, CLASSES = 9, 4, 4


class Residual(nn.Module):
    """Convolutions of several strides and groups, group norms, a shortcut, average pools and a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.GroupNorm(2, 4)
        self.a, self.b = nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.Conv2d(6, 6, 3, padding="same", groups=2)
        self.short, self.norms = nn.Conv2d(4, 6, 1, stride=2), nn.ModuleList(nn.GroupNorm(3, 6) for _ in range(2))
        self.drop, self.out = nn.Dropout2d(0.0), nn.Linear(6 + 24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        y = self.norms[1](self.b(F.silu(self.norms[0](self.a(x)))))
        y = F.gelu(y + self.short(x))
        pooled = F.adaptive_avg_pool2d(y, 1).flatten(1)
        return self.out(torch.cat([pooled, F.avg_pool2d(y, 2).flatten(1)], 1))


class Waves(nn.Module):
    """One-dimensional convolutions, batch norm's kin for them, and tensors used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.deep = nn.Conv1d(3, 4, 3, dilation=2, padding=2), nn.Conv1d(4, 4, 3, padding=1)
        self.norm, self.plain = nn.LayerNorm([4, 8]), nn.GroupNorm(2, 4, affine=False)
        self.gate, self.out = nn.Linear(8, 8, bias=False), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.conv(x)))
        x = x * torch.sigmoid(self.gate(x)) + self.plain(self.deep(x))
        return self.out(F.adaptive_avg_pool1d(x, 1).squeeze(-1))


class Recurrent(nn.Module):
    """Words, embedded and read one after another."""

    def __init__(self, kind: Any, batch_first: bool = True, last: bool = True, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 3, padding_idx=-2)
        self.rnn = kind(3, 4, batch_first=batch_first, **options)
        self.out = nn.Linear(4 * (2 if options.get("bidirectional") else 1), CLASSES)
        self.batch_first, self.last = batch_first, last

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        out, states = self.rnn(x if self.batch_first else x.transpose(0, 1))
        out = out if self.batch_first else out.transpose(0, 1)
        if self.last:
            return self.out(out[:, -1])
        state = states[0] if isinstance(states, tuple) else states
        more = states[1].sum(0) if isinstance(states, tuple) else 0.0
        return self.out(out.mean(1)) + (state.sum(0) + more)[:, :CLASSES]


class Cells(nn.Module):
    """The same, where the loop over the words is in the model; the first cell's outputs are used twice."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, 3), nn.Linear(4, CLASSES)
        self.low, self.high = kind(3, 4, **options), kind(4, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        low, high = None, None
        for now in self.embed(x).unbind(1):
            low = self.low(now, low)
            read = low[0] if isinstance(low, tuple) else low
            high = self.high(torch.tanh(read), high)
        return self.out(read + (high[0] * high[1] if isinstance(high, tuple) else high))


class Transformer(nn.Module):
    """An encoder on embedded words, with what people put around it."""

    def __init__(self, dropout: float = 0.0, norm_first: bool = False) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, 4), nn.Parameter(torch.linspace(-1, 1, TIMES * 4).view(TIMES, 4))
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, "gelu", batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(4), enable_nested_tensor=False)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(self.embed(x) + self.place).mean(1))


class Attention(nn.Module):
    """Attention with masks, with other keys than queries, and torch's own function."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 4)
        self.mine = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)
        self.other = nn.MultiheadAttention(4, 2, dropout=dropout, kdim=3, vdim=3, bias=False)
        self.out, self.dropout = nn.Linear(4, CLASSES), dropout

    def forward(self, x: Tensor) -> Tensor:
        words, padding = self.embed(x), (x == 0) & (torch.arange(TIMES) > 0)
        causal = torch.ones(TIMES, TIMES, dtype=torch.bool).triu(1)
        a, weights = self.mine(words, words, words, key_padding_mask=padding, attn_mask=causal, is_causal=True)
        keys = words[..., :3].transpose(0, 1)
        b, _ = self.other(a.transpose(0, 1), keys, keys, need_weights=False)
        heads = words.unflatten(-1, (2, 2)).transpose(1, 2)
        p = self.dropout if self.training else 0.0
        c = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True, dropout_p=p)
        return (
            self.out((a + b.transpose(0, 1)).mean(1) + c.transpose(1, 2).flatten(2).sum(1))
            + weights.mean((1, 2))[:, None]
        )


class Tied(nn.Module):
    """The embedding is the output layer as well (one parameter, two names), and one layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(WORDS, 4), nn.Linear(4, 4)
        self.out = nn.Linear(4, WORDS, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(torch.tanh(self.mix(self.embed(x)))).mean(1)))


class Frozen(Residual):
    """Parts that are not trained: a layer, half of another, and batch norm with the statistics it came with."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        with torch.no_grad():
            self.norm.running_mean += 0.3
            self.norm.running_var *= 2
        self.norm.eval().requires_grad_(False)
        self.stem.requires_grad_(False)
        self.a.weight.requires_grad_(False)


class Normed(Residual):
    """As people have it: with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norms = nn.BatchNorm2d(4), nn.ModuleList(nn.BatchNorm2d(6) for _ in range(2))


class Network(NamedTuple):
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: bool = False
    draws: bool = False  # whether it has dropout

    def module(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.build().to(dtype)

    def examples(self, *lead: int, seed: int = 1) -> Tensor:
        g = generator(seed)
        if self.words:
            return torch.randint(0, WORDS, (*lead, *self.shape), generator=g)
        return torch.randn(*lead, *self.shape, generator=g, dtype=torch.float64)


def words(build: Callable[[], nn.Module], draws: bool = False) -> Network:
    return Network(build, (TIMES,), True, draws)


NETWORKS = {
    "residual": Network(Residual, (2, 8, 8)),
    "waves": Network(Waves, (3, 8)),
    "lstm": words(lambda: Recurrent(nn.LSTM, num_layers=2)),
    "lstm, time first, two directions": words(
        lambda: Recurrent(nn.LSTM, batch_first=False, last=False, num_layers=2, bidirectional=True)
    ),
    "lstm, dropout": words(lambda: Recurrent(nn.LSTM, batch_first=False, num_layers=3, dropout=0.4), draws=True),
    "lstm, projected": words(lambda: Projected()),
    "gru": words(lambda: Recurrent(nn.GRU, num_layers=2)),
    "gru, no bias, two directions": words(lambda: Recurrent(nn.GRU, last=False, bias=False, bidirectional=True)),
    "gru, dropout": words(lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.3), draws=True),
    "rnn": words(lambda: Recurrent(nn.RNN, num_layers=2, nonlinearity="relu", dropout=0.2), draws=True),
    "lstm cells": words(lambda: Cells(nn.LSTMCell)),
    "gru cells": words(lambda: Cells(nn.GRUCell, bias=False)),
    "transformer": words(Transformer),
    "transformer, dropout": words(lambda: Transformer(0.3, norm_first=True), draws=True),
    "attention": words(Attention),
    "attention, dropout": words(lambda: Attention(0.3), draws=True),
    "tied": words(Tied),
    "frozen": Network(Frozen, (2, 8, 8)),
    "adapters": words(lambda: fedge.models.lora(Transformer(), rank=2, train=("out",))),
    "no batch norm": Network(lambda: fedge.models.without_batch_norm(Normed()), (2, 8, 8)),
}


class Projected(nn.Module):
    """Hidden states made smaller: the one form of LSTM without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(WORDS, 3), nn.LSTM(3, 5, proj_size=2), nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(x).transpose(0, 1))[0][-1])


def federation(network: Network) -> fedge.Federation:
    """Four clients, the last of them smaller."""
    x = network.examples(40)
    y = torch.arange(40) % CLASSES
    data = fedge.data.Data(x[:32], y[:32], x[32:], y[32:], CLASSES)
    return fedge.Federation(data, [range(9), range(9, 18), range(18, 27), range(27, 32)])
