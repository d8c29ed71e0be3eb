"""Models as newcomers bring them: is one refused without a remedy, or slower than a plain loop over clients?

OMP_NUM_THREADS=1 python -m benchmarks.newcomers [NAME]...    one CPU thread; ends with 1 if the answer is yes

Every model with clients of ten examples (one local step per round) and of sixty (six), once everything is recorded; and
in short runs from their first to their last round, with the choice of a way and all recordings, of clients that have 5
to 199 examples. Ours and the loop in turns, in CPU time, on which other work on the machine has
little influence. A model is slower if the median of its turns is below `SLACK` of the loop's speed: less is what turns
of one and the same program differ by.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import processors
from fedge import models
from fedge.algorithms import FedAvg
from fedge.bench.networks import TIMES, WORDS
from fedge.bench.plain import plain_round
from fedge.bench.timing import Round
from fedge.bench.workloads import LARGE, SMALL, Workload, images, texts
from fedge.core import At
from fedge.engine.recording.recorder import WARM
from fedge.federation import Federation
from fedge.handle.module import check_module
from fedge.loop import cohorts

REPEATS, SPAN, SLACK = 5, 0.1, 0.95
SIZES = (SMALL, LARGE, None)  # examples of a client; None: short runs
RUNS, ROUNDS, MOST = 3, 20, 200  # short runs, how short they are, and what their clients have less of
FIGURES = Path(__file__).parent / "newcomers.json"
# Known to be slower, by processor: one step of millions of weights is reading and writing them, and checks read them
# again.
LOSES = {
    "Intel(R) Xeon(R) Processor, 2 threads": {"large layers, 10"},
}


class Residual(nn.Module):
    """A small residual net; `norm` makes a normalisation of so many channels."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.one, self.two = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norms = nn.ModuleList([norm(16), norm(16)])
        self.head = nn.Linear(16 * 7 * 7, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = self.norms[1](self.two(F.relu(self.norms[0](self.one(x)))))
        found: Tensor = self.head(F.max_pool2d(F.relu(x + y), 2).flatten(1))
        return found


class Read(nn.Module):
    """Characters embedded, read by a recurrent layer, and the next one predicted."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(WORDS, 16), kind(16, 32, batch_first=True), nn.Linear(32, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.rnn(self.embed(x))[0][:, -1])
        return found


class Cells(nn.Module):
    """The same, where the loop over the characters is in the model."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(WORDS, 16), kind(16, 32), nn.Linear(32, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for now in self.embed(x).unbind(1):
            state = self.cell(now, state)
        found: Tensor = self.out(state[0] if isinstance(state, tuple) else state)
        return found


class Bag(nn.Module):
    """The mean of embedded characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, 32), nn.Linear(32, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.embed(x).mean(1))
        return found


class Tied(nn.Module):
    """The output layer has the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(WORDS, 32), nn.Linear(32, 32), nn.Linear(32, WORDS)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(torch.tanh(self.mix(self.embed(x).mean(1))))
        return found


class Encoder(nn.Module):
    """Two layers of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, 32), nn.Parameter(torch.zeros(TIMES, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.encoder(self.embed(x) + self.place).mean(1))
        return found


class Block(nn.Module):
    """A block of a transformer as people write it: causal attention by torch's function, then a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms, self.heads = nn.ModuleList(nn.LayerNorm(width) for _ in range(2)), heads
        self.parts, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.parts(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.joined(heads))
        found: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norms[1](x)))))
        return found


class Writer(nn.Module):
    """Two such blocks, and the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, 32), nn.Parameter(torch.zeros(TIMES, 32))
        self.blocks, self.norm = nn.Sequential(Block(32, 4), Block(32, 4)), nn.LayerNorm(32)
        self.out = nn.Linear(32, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.norm(self.blocks(self.embed(x) + self.place))[:, -1])
        return found


class Vision(nn.Module):
    """A transformer on the patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.first = nn.Conv2d(1, 32, 7, stride=7), nn.Parameter(torch.zeros(1, 1, 32))
        self.place = nn.Parameter(torch.zeros(17, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.encoder, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), patches], 1) + self.place
        found: Tensor = self.out(self.encoder(x)[:, 0])
        return found


class Mobile(nn.Module):
    """Convolutions channel by channel, then across channels, as networks for phones have them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.own = nn.Conv2d(1, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 1, 1, groups=16)
        self.across, self.norm = nn.Conv2d(16, 32, 1), nn.GroupNorm(4, 32)
        self.small, self.last = nn.Conv2d(32, 32, 3, 2, 1, groups=32), nn.Conv2d(32, 64, 1)
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.norm(self.across(F.relu(self.own(F.relu6(self.stem(x)))))))
        x = F.relu(self.last(F.relu(self.small(x))))
        found: Tensor = self.out(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return found


def perceptron() -> nn.Module:
    """A chain whose 1.9 million weights outweigh a batch: a client's step is mostly reading and writing them."""
    layers = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def frozen() -> nn.Module:
    """Only the head of a residual net is trained."""
    model = Residual(lambda channels: nn.GroupNorm(4, channels))
    for name, leaf in model.named_parameters():
        leaf.requires_grad_(name.startswith("head"))
    return model


def trained_batch_norm() -> nn.Module:
    """Batch norm with the statistics of a trained model, in evaluation mode: the second remedy."""
    model = Residual(nn.BatchNorm2d)
    for layer in model.norms:
        layer.eval()
    return model


def remedied() -> nn.Module:
    """Batch norm is refused; the first remedy that the refusal names."""
    model = Residual(nn.BatchNorm2d)
    try:
        check_module(model)
    except ValueError as error:
        if "fedge.models.without_batch_norm(model)" not in str(error):
            raise AssertionError(f"refused without a remedy: {error}") from error
        return models.without_batch_norm(model)
    raise AssertionError("batch norm that keeps running statistics was not refused")


MODELS: dict[str, tuple[str, Callable[[], nn.Module], bool]] = {
    "residual": (
        "own residual net with group norm",
        lambda: Residual(lambda channels: nn.GroupNorm(4, channels)),
        True,
    ),
    "lstm": ("LSTM of width 32", lambda: Read(nn.LSTM), False),
    "gru": ("GRU of width 32", lambda: Read(nn.GRU), False),
    "transformer": ("two-layer transformer of width 32 with dropout", Encoder, False),
    "own attention": ("two blocks of a transformer written by hand, with dropout", Writer, False),
    "vision": ("two-layer transformer on patches of an image", Vision, True),
    "mobile": ("convolutions channel by channel, with group norm", Mobile, True),
    "tied": ("output layer tied to the embedding", Tied, False),
    "frozen": ("residual net of which the head is trained", frozen, True),
    "batch norm": ("batch norm replaced by fedge.models.without_batch_norm", remedied, True),
    "batch norm, still": ("batch norm in evaluation mode", trained_batch_norm, True),
    "embedding": ("mean of embeddings", Bag, False),
    "large layers": ("perceptron with two hidden layers of 1024", perceptron, True),
    "lstm cells": ("LSTM of width 32 by nn.LSTMCell", lambda: Cells(nn.LSTMCell), False),
}


def workload(name: str, each: int | None) -> Workload:
    """`each`: examples of a client; None: 5 to 199 of them."""
    title, make, pictures = MODELS[name]

    def build(gpu: bool) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            algorithm = FedAvg(make(), epochs=1, batch_size=10)
        shared = images((1, 28, 28), 100, each or MOST) if pictures else texts(100, each or MOST)
        return algorithm, shared if each else uneven(shared)

    size, kind = ("5 to 199", f", {ROUNDS} rounds from nothing") if each is None else (str(each), "")
    return Workload(f"{name}, {each or 'run'}", f"{title}{kind}, 20 of 100 clients x {size}, B 10, E 1", build, 20)


def uneven(shared: Federation) -> Federation:
    """The first 5 to 199 examples of every client."""
    counts = np.random.default_rng(1).integers(5, MOST, shared.clients)
    return Federation(shared.data, [shared.examples(k)[:count] for k, count in enumerate(counts.tolist())])


def ratio(one: dict[str, Any]) -> float:
    """The median over the turns of how many times faster than the loop."""
    return statistics.median(b / a for a, b in zip(one["seconds"], one["plain"], strict=True))


def spent(step: Callable[[], Any], times: int) -> float:
    """CPU seconds per call."""
    begin = time.process_time()
    for _ in range(times):
        step()
    return (time.process_time() - begin) / times


def compare(work: Workload) -> dict[str, Any]:
    """CPU seconds per round of both sides, turn by turn, once everything is recorded."""
    begin = time.perf_counter()
    ours, loop = Round(work, "cpu"), plain_round(*work.build(False), torch.arange(work.cohort), torch.device("cpu"))
    ours()
    first = time.perf_counter() - begin
    with ours.working():
        counts = [max(1, round(SPAN / spent(step, WARM["cpu"]))) for step in (ours, loop)]
        pairs = [(spent(ours, counts[0]), spent(loop, counts[1])) for _ in range(REPEATS)]
    found = {"workload": work.name, "title": work.title, "way": ours.link.way, "first": first}
    return found | {"seconds": [a for a, _ in pairs], "plain": [b for _, b in pairs]}


def whole(work: Workload) -> dict[str, Any]:
    """The same of runs from nothing, with whatever comes before a run is fast."""
    found: dict[str, Any] = {"workload": work.name, "title": work.title, "seconds": [], "plain": [], "choice": []}
    torch.ones(1, requires_grad=True).sum().backward()  # imports what both sides need
    for _ in range(RUNS):
        ours, draw = Round(work, "cpu", rounds=ROUNDS), cohorts(100, work.cohort)
        loops = iter(
            [plain_round(*work.build(False), draw(At(0, n, 0)), torch.device("cpu")) for n in range(1, ROUNDS + 1)]
        )
        with ours.working():
            begin = time.perf_counter()
            first = spent(ours, 1)
            found["first"] = time.perf_counter() - begin
            found["seconds"].append((first + spent(ours, ROUNDS - 1) * (ROUNDS - 1)) / ROUNDS)
            found["plain"].append(spent(lambda: next(loops)(), ROUNDS))  # noqa: B023
        found["choice"].append(first)
    return found | {"way": ours.link.way}


def main(args: list[str]) -> int:
    torch.set_num_threads(1)
    figures = processors.stored(FIGURES)
    timings = processors.own(figures, {})["timings"]
    slower = []
    for name in args or MODELS:
        for each in SIZES:
            one = compare(workload(name, each)) if each else whole(workload(name, each))
            timings[one["workload"]] = one
            processors.keep(FIGURES, figures)
            print(f"{one['workload']}: {ratio(one):.2f} times the loop, in the way '{one['way']}'", flush=True)
            slower += [one["workload"]] if ratio(one) < SLACK else []
    print(f"slower than the loop: {'; '.join(slower) or 'none'}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
