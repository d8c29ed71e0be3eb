"""Layers in C against torch's, forwards and backwards: is this processor one that they are faster on?

python -m benchmarks.layers           measures on one thread, in CPU time, keeps the figures and writes the table
python -m benchmarks.layers --page    writes the table in docs/speed.md from the stored figures
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks import processors
from benchmarks.readme import replaced
from benchmarks.speed.page import markdown
from fedge.engine.recording import c_attention, c_conv, c_layer_norm, c_linear
from fedge.engine.recording.conv_source import Geometry
from fedge.engine.recording.graph_passes import call_directly, simplify
from fedge.engine.recording.memory_passes import reuse_memory
from fedge.handle import attention as written

FIGURES = Path(__file__).parent / "layers.json"
PAGE = Path(__file__).parents[1] / "docs" / "speed.md"
COMMAND = "python -m benchmarks.layers"
EXAMPLES, REPEATS, SPAN = 10, 5, 0.02  # SPAN: seconds of calls in a row

# channels, outputs, side, kernel, stride, padding
CONVOLUTIONS = [
    (1, 16, 28, 5, 1, 2), (16, 32, 14, 5, 1, 2), (3, 16, 32, 3, 1, 1), (16, 16, 32, 3, 1, 1), (16, 32, 32, 3, 2, 1),
    (16, 32, 32, 1, 2, 0), (32, 32, 16, 3, 1, 1), (32, 64, 16, 3, 2, 1), (64, 64, 8, 3, 1, 1), (64, 64, 32, 3, 1, 1),
]  # fmt: skip
LINEARS = [(1568, 512), (784, 1024), (1024, 1024), (2048, 2048), (256, 256)]  # inputs, outputs
ATTENTION = [(4, 8, 20), (4, 16, 64), (4, 32, 128), (8, 64, 256)]  # heads, numbers per head, positions
NORMS = [(32, 20), (128, 64), (512, 64)]  # numbers per position, positions
CLIENTS = 5  # of attention and norms, which are for stacks of clients

Step = Callable[[], Any]


def convolution(channels: int, outputs: int, side: int, kernel: int, stride: int, padding: int) -> tuple[str, int, Step, Step]:  # fmt: skip # noqa: E501
    """What it is, its multiplications in all three products, and both sides."""
    into = channels > 3  # the first layer has no gradient in the images
    of = Geometry(channels, outputs, side, side, (kernel,) * 2, (stride,) * 2, (padding,) * 2, into, torch.float32)
    x = torch.randn(EXAMPLES, channels, side, side).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(outputs, channels, kernel, kernel), torch.randn(outputs)
    slope = torch.randn_like(F.conv2d(x, weight, bias, stride, padding))

    def ours() -> None:
        c_conv._forward(x, weight, bias, of.numbers)
        c_conv._backward(slope, x, weight, [*of.numbers, 1])

    def theirs() -> None:
        F.conv2d(x, weight, bias, stride, padding)
        torch.ops.aten.convolution_backward(
            slope, x, weight, [outputs], of.stride, of.padding, [1, 1], False, [0, 0], 1, [into, True, True]
        )

    name = f"{channels} to {outputs} channels, {side} x {side} pixels, kernel {kernel}, stride {stride}"
    return name, (2 + into) * slope.numel() * channels * kernel**2, ours, theirs


def linear(inputs: int, outputs: int) -> tuple[str, int, Step, Step]:
    x, slope = torch.randn(EXAMPLES, inputs), torch.randn(EXAMPLES, outputs)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)

    def ours() -> None:
        c_linear._forward(x, weight, bias)
        c_linear._backward(slope, x, weight, [1])

    def theirs() -> None:
        torch.addmm(bias, x, weight.mT)
        slope.mT @ x, slope @ weight, slope.sum(0)

    return f"{inputs} inputs, {outputs} outputs", 3 * EXAMPLES * inputs * outputs, ours, theirs


def recorded(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Step, Tensor]:
    """Torch's operations forwards and backwards, as a recorded step has them, and a slope."""
    slope = torch.randn_like(function(*tensors))

    def both(*given: Tensor) -> list[Tensor]:
        own = [one.detach().requires_grad_() for one in given]
        return list(torch.autograd.grad(function(*own), own, slope))

    graph = make_fx(both)(*tensors)
    simplify(graph)
    reuse_memory(graph)
    call_directly(graph)
    return torch.no_grad()(lambda: graph.forward(*tensors)), slope


def attention(heads: int, width: int, times: int) -> tuple[str, int, Step, Step]:
    x = torch.randn(CLIENTS, EXAMPLES, times, 3 * heads * width)
    numbers = [heads, width**-0.5, False, False, False]
    theirs, slope = recorded(lambda x: written.to_itself(x, heads, None, None, False), x)

    def ours() -> None:
        _, p = c_attention._forward(x, x, x, numbers)
        c_attention._backward(slope, x, p, x, numbers)

    products = 6 * CLIENTS * EXAMPLES * heads * times**2 * width
    return f"{heads} heads of {width}, {times} positions", products, ours, theirs


def layer_norm(width: int, times: int) -> tuple[str, int, Step, Step]:
    x, weight, bias = (torch.randn(CLIENTS, *shape, width) for shape in [(EXAMPLES, times), (), ()])

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (width,)) * weight[:, None, None] + bias[:, None, None]

    theirs, slope = recorded(plain, x, weight, bias)

    def ours() -> None:
        _, m, r = c_layer_norm._forward(x, weight, bias, [1e-5])
        c_layer_norm._backward(slope, x, weight, m, r)

    return f"{width} numbers, {times} positions", 0, ours, theirs


def spent(step: Step, times: int) -> float:
    begin = time.process_time()
    for _ in range(times):
        step()
    return (time.process_time() - begin) / times


def compare(name: str, products: int, ours: Step, theirs: Step) -> dict[str, Any]:
    """CPU seconds per call of both sides, turn by turn."""
    counts = [max(1, round(SPAN / max(spent(step, 3), 1e-6))) for step in (ours, theirs)]
    pairs = [(spent(ours, counts[0]), spent(theirs, counts[1])) for _ in range(REPEATS)]
    return {"layer": name, "products": products, "seconds": [a for a, _ in pairs], "plain": [b for _, b in pairs]}


def measure() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = [("convolution", convolution(*sizes)) for sizes in CONVOLUTIONS]
    made += [("linear", linear(*sizes)) for sizes in LINEARS]
    made += [("attention", attention(*sizes)) for sizes in ATTENTION]
    made += [("layer norm", layer_norm(*sizes)) for sizes in NORMS]
    figures = processors.stored(FIGURES)
    own = processors.own(figures, [])
    own["examples"], own["timings"] = EXAMPLES, [{"kind": kind, **compare(*one)} for kind, one in made]
    processors.keep(FIGURES, figures)


def table() -> str:
    head, rows = ["layer", "on", "in C, µs", "GFLOP/s", "torch, µs", "times faster (each turn)"], []
    figures = processors.stored(FIGURES)
    every = [(processors.in_short(name), one) for name, own in figures.items() for one in own["timings"]]
    for on, one in every:
        ours, theirs = (statistics.median(one[side]) for side in ("seconds", "plain"))
        turns = sorted(b / a for a, b in zip(one["seconds"], one["plain"], strict=True))
        faster = f"{theirs / ours:.2f} ({turns[0]:.2f} to {turns[-1]:.2f})"
        speed = f"{2e-9 * one['products'] / ours:.0f}" if one["products"] else ""
        rows.append([f"{one['kind']}, {one['layer']}", on, f"{1e6 * ours:.0f}", speed, f"{1e6 * theirs:.0f}", faster])
    return markdown(head, rows)


def main(args: list[str]) -> None:
    if args not in ([], ["--page"]):
        sys.exit(f"unknown arguments {' '.join(args)}: give none, or --page")
    if not args:
        measure()
    PAGE.write_text(replaced(PAGE.read_text("utf-8"), "layers", table(), COMMAND, PAGE.name))
    print(table(), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
