"""Convolutions and large linear layers in C: torch's outputs and gradients, and only where they are wanted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedge
from fedge import once
from fedge.core import Batch
from fedge.engine import Simulator
from fedge.engine.recording import c_conv, c_linear, c_norm, c_pooled, conv_source, linear_source
from fedge.engine.recording.c_library import NoCompiler, there_is_a_compiler
from fedge.engine.recording.c_linear import DirectLinear, direct
from fedge.engine.recording.conv_layer import DirectConv
from fedge.engine.recording.conv_source import Geometry
from fedge.engine.recording.pooled_layer import joined
from fedge.handle import GraphHandle, Handle, WrittenHandle, parameters
from fedge.losses import cross_entropy
from tests.cases import close, generator, goes_on_as_it_began
from tests.in_c import drawn, forget, fresh_cache

pytestmark = pytest.mark.skipif(not there_is_a_compiler(), reason="no C compiler on this machine")
CACHED: tuple[Any, ...] = (c_conv.program, c_linear.program, c_linear.is_there, c_norm.program, c_pooled.program)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


own_cache = fresh_cache(*CACHED)


def agrees(found: Any, expected: Any, limit: float) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) <= limit * float(b.abs().max())


# channels, outputs, height, width, kernel, stride, padding
SIZES: list[tuple[int, int, int, int, tuple[int, int], tuple[int, int], tuple[int, int]]] = [
    (16, 32, 9, 9, (3, 3), (1, 1), (1, 1)),
    (16, 16, 33, 5, (3, 3), (1, 1), (1, 1)),  # more than a tile in a row, and the last one overlaps
    (32, 16, 8, 11, (3, 3), (2, 2), (1, 1)),  # four classes of pixels
    (8, 8, 7, 6, (5, 4), (1, 1), (2, 0)),  # half a vector, sides and kernel uneven
    (16, 32, 8, 8, (1, 1), (2, 2), (0, 0)),  # a shortcut: most pixels see nothing
    (16, 16, 10, 9, (2, 3), (3, 2), (0, 1)),  # a stride beyond the kernel, and pixels that no patch holds
    (4, 64, 6, 6, (3, 3), (1, 1), (2, 2)),  # more zeros around than pixels that are needed
    (16, 16, 2, 2, (3, 3), (1, 1), (1, 1)),
    (48, 16, 5, 5, (3, 3), (1, 1), (1, 1)),
    (16, 16, 4, 4, (2, 2), (2, 2), (3, 3)),  # patches of nothing but zeros
]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("bytes_", [64, 32, 16])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_convolution_and_its_gradients_are_torch_s(
    sizes: Any, bytes_: int, dtype: torch.dtype, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the vectors of other processors, which this one has too, or the compiler makes of its own."""
    monkeypatch.setattr(conv_source, "vector_bytes", lambda: bytes_)
    c_conv.program.cache_clear()
    channels, outputs, height, width, kernel, stride, padding = sizes
    of = Geometry(*sizes, into=True, dtype=dtype)
    x, weight, bias = (
        drawn(3, channels, height, width, seed=0),
        drawn(outputs, channels, *kernel, seed=1),
        drawn(outputs, seed=2),
    )
    own = [one.requires_grad_() for one in (weight, bias, x)]
    expected = F.conv2d(own[2], own[0], own[1], stride, padding)
    g = drawn(*expected.shape, seed=3)
    mine = [one.detach().to(dtype) for one in own]
    out = c_conv.forward(mine[2], mine[0], mine[1], of.numbers)
    agrees(out, [expected.detach()], limit)
    assert out[0].is_contiguous(memory_format=torch.channels_last)
    bare = c_conv.forward(mine[2], mine[0], mine[1][:0], of.numbers)
    agrees(bare, [F.conv2d(x, weight, None, stride, padding).detach()], limit)
    wanted = torch.autograd.grad(expected, own, g)
    agrees(c_conv.backward(g.to(dtype), mine[2], mine[0], [*of.numbers, 1]), wanted, limit)
    slope, level, into = c_conv.backward(g.to(dtype), mine[2], mine[0], [*of.numbers, 0])
    agrees([slope, into], [wanted[0], wanted[2]], limit)
    assert level.numel() == 0
    c_conv.program.cache_clear()


@pytest.mark.parametrize("bytes_", [64, 32, 16])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize(
    ("examples", "inputs", "outputs"), [(1, 64, 32), (5, 131, 37), (13, 100, 10), (64, 16, 3), (2, 7, 1)]
)
def test_a_linear_layer_and_its_gradients_are_torch_s(
    examples: int, inputs: int, outputs: int, dtype: torch.dtype, limit: float, bytes_: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(linear_source, "vector_bytes", lambda: bytes_)
    c_linear.program.cache_clear()
    own = [drawn(*shape, seed=seed).requires_grad_() for seed, shape in enumerate([(outputs, inputs), (outputs,), (examples, inputs)])]  # fmt: skip # noqa: E501
    expected = F.linear(own[2], own[0], own[1])
    g = drawn(examples, outputs, seed=3)
    w, b, x = (one.detach().to(dtype) for one in own)
    agrees(c_linear.forward(x, w, b), [expected.detach()], limit)
    agrees(c_linear.forward(x, w, b[:0]), [F.linear(x, w).double()], limit)
    wanted = torch.autograd.grad(expected, own, g)
    agrees(c_linear.backward(g.to(dtype), x, w, [1]), wanted, limit)
    agrees(c_linear.backward(g.to(dtype), x, w, [0]), wanted[:2], limit)
    c_linear.program.cache_clear()


def chain() -> nn.Module:
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16 * 9, 512), nn.ReLU(), nn.Linear(512, 10))


class Net(nn.Module):
    """Not a chain: a shortcut, a stride, and a large layer on vectors of two axes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1, bias=False)
        self.short, self.wide, self.out = nn.Conv2d(16, 32, 1, 2), nn.Linear(16, 4096), nn.Linear(4096, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(self.down(x) + self.short(x)).flatten(2)
        found: Tensor = self.out(torch.tanh(self.wide(x)).mean(1))
        return found


def made(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().double()


def batch() -> Batch:
    labels = torch.randint(0, 10, (5,), generator=generator(1))
    return Batch(drawn(5, 1, 8, 8, seed=0), labels, torch.tensor([True] * 4 + [False]), torch.tensor(3))


def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is called in C from now on."""
    seen: list[str] = []
    for module, names in ((c_conv, ("forward", "backward")), (c_linear, ("forward", "backward"))):
        for name in names:
            inner = getattr(module, name)
            label = f"{module.__name__.rpartition('.')[2]}.{name}"
            monkeypatch.setattr(module, name, lambda *a, inner=inner, label=label: seen.append(label) or inner(*a))
    return seen


def test_the_gradient_of_a_chain_is_autograd_s(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = called(monkeypatch)
    monkeypatch.setattr("fedge.engine.recording.conv_layer.backward", c_conv.backward)
    model = made(chain)
    plain, written, params = Handle(model, cross_entropy), WrittenHandle(made(chain), cross_entropy), parameters(model)
    written.program.alone = direct(joined(written.program.layers), params)
    kinds = [type(layer) for layer in written.program.alone]
    assert (kinds.count(DirectConv), kinds.count(DirectLinear)) == (1, 1)
    assert close(plain.grad(params, batch()), written.grad(params, batch())) < 1e-12
    assert sorted(seen) == [
        "c_conv.backward",
        "c_conv.forward",
        "c_conv.forward",
        "c_linear.backward",
        "c_linear.forward",
    ]


def test_the_gradient_of_a_graph_is_autograd_s(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = called(monkeypatch)
    model = made(Net)
    plain, graph, params = Handle(model, cross_entropy), GraphHandle(made(Net), cross_entropy), parameters(model)
    graph.program.alone = {F.conv2d: c_conv.conv2d, **c_linear.rules(params)}
    assert close(plain.grad(params, batch()), graph.grad(params, batch())) < 1e-12
    assert seen.count("c_conv.forward") == seen.count("c_conv.backward") == 3
    assert seen.count("c_linear.forward") == seen.count("c_linear.backward") == 1


PLAIN = torch.zeros(3, 16, 8, 8)


@pytest.mark.parametrize(
    ("x", "weight", "stride", "padding"),
    [
        (PLAIN, torch.zeros(20, 16, 3, 3), 1, 1),  # a vector would be half empty
        (PLAIN, torch.zeros(512, 16, 3, 3), 1, 1),  # many weights
        (PLAIN, torch.zeros(16, 16, 3, 3), 1, "same"),
        (PLAIN, torch.zeros(16, 16, 9, 9), 1, 0),  # larger than the images
        (PLAIN, torch.zeros(16, 16, 3, 3, dtype=torch.float64), 1, 1),
        (PLAIN.half(), torch.zeros(16, 16, 3, 3).half(), 1, 1),
        (PLAIN[0], torch.zeros(16, 16, 3, 3), 1, 1),
        (PLAIN[:0], torch.zeros(16, 16, 3, 3), 1, 1),
        (PLAIN[:, :8], torch.zeros(16, 16, 3, 3), 1, 1),
    ],
)
def test_other_convolutions_are_torch_s(x: Tensor, weight: Tensor, stride: Any, padding: Any) -> None:
    assert c_conv.suits(PLAIN, torch.zeros(16, 16, 3, 3), 1, 1, into=True) is not None
    assert c_conv.suits(x, weight, stride, padding, into=True) is None


def test_several_threads_are_torch_s() -> None:
    torch.set_num_threads(2)
    assert c_conv.suits(PLAIN, torch.zeros(16, 16, 3, 3), 1, 1, into=True) is None
    assert not c_linear.suits(torch.zeros(2, 256), torch.zeros(256, 256))
    torch.set_num_threads(1)
    assert c_linear.suits(torch.zeros(2, 256), torch.zeros(256, 256))
    assert not c_linear.suits(torch.zeros(256), torch.zeros(256, 256))
    assert not c_linear.suits(torch.zeros(2, 255), torch.zeros(256, 255))


@pytest.mark.parametrize(("dilation", "groups", "channels"), [(2, 1, 16), (1, 2, 8)])
def test_dilated_and_grouped_ones_are_torch_s(dilation: int, groups: int, channels: int) -> None:
    x, weight = drawn(2, 16, 8, 8, seed=0).float(), drawn(16, channels, 3, 3, seed=1).float()
    found = c_conv.conv2d(x, weight, None, 1, 2, dilation, groups)
    expected = F.conv2d(x, weight, None, 1, 2, dilation, groups)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 1e-4


def test_a_stride_of_one_number_in_a_list_is_torch_s_too() -> None:
    x, weight = drawn(2, 16, 8, 8, seed=0).float(), drawn(16, 16, 3, 3, seed=1).float()
    found = c_conv.conv2d(x, weight, None, (2,), (1,))
    assert float((found - F.conv2d(x, weight, None, (2,), (1,))).abs().max()) < 1e-4


WIDE = drawn(256, 256, seed=6)


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (drawn(2, 256, seed=5), WIDE, drawn(1, seed=7)),  # stretched
        (drawn(2, 70_000, seed=5), drawn(70_000, seed=6), None),  # a weight of one axis
        (drawn(2, 256, seed=5), WIDE, None),
    ],
)
def test_what_torch_would_stretch_is_torch_s(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    assert c_linear.suits(x, weight, bias) is (weight.dim() == 2 and bias is None)
    agrees([c_linear.linear(x, weight, bias)], [F.linear(x, weight, bias)], 1e-12)


def test_what_torch_would_refuse_is_refused() -> None:
    for x in (drawn(2, 200, seed=5), drawn(2, 300, seed=5)):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            c_linear.linear(x, WIDE)
    with pytest.raises(RuntimeError):
        c_linear.linear(drawn(2, 256, seed=5), WIDE, torch.zeros(3, dtype=torch.float64))
    with pytest.raises(RuntimeError):
        c_conv.conv2d(PLAIN, torch.zeros(16, 16, 3, 3), torch.zeros(4))


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_second_derivatives_and_transformed_calls_are_torch_s(kind: str) -> None:
    """A model may differentiate in its forward pass: a penalty, a force, a score."""
    ours, theirs = (c_linear.linear, F.linear) if kind == "linear" else (c_conv.conv2d, F.conv2d)
    x = drawn(2, 256, seed=5) if kind == "linear" else drawn(2, 16, 5, 5, seed=5)
    weight = WIDE if kind == "linear" else drawn(16, 16, 3, 3, seed=6)
    bias = drawn(len(weight), seed=7)

    def penalty(function: Any) -> tuple[Tensor, ...]:
        own = [one.clone().requires_grad_() for one in (x, weight, bias)]
        (slope,) = torch.autograd.grad(torch.tanh(function(*own)).sum(), own[0], create_graph=True)
        return torch.autograd.grad(slope.square().sum(), own)

    agrees(penalty(ours), penalty(theirs), 1e-12)
    slopes = [torch.func.grad(lambda own, f=f: torch.tanh(f(x, own, bias)).sum())(weight) for f in (ours, theirs)]
    agrees(slopes[:1], slopes[1:], 1e-12)


def test_large_images_keep_no_room_in_a_thread() -> None:
    small, large = (c_pooled.Geometry(16, 16, side, side, (3, 3), (1, 1), (2, 2), torch.float32) for side in (32, 512))
    assert small.room <= c_conv.ROOM < large.room
    assert c_conv.suits(torch.zeros(1, 16, 512, 512), torch.zeros(16, 16, 3, 3), 1, 1, into=True) is None


def shared() -> fedge.Federation:
    x, y = drawn(60, 1, 8, 8, seed=4), torch.arange(60) % 10
    data = fedge.data.Data(x, y, x[:10], y[:10], 10)
    return fedge.Federation(data, [list(range(k * 10, k * 10 + 10 - k)) for k in range(6)])


def algorithm(build: Callable[[], nn.Module], dtype: torch.dtype) -> fedge.FedAvg:
    return fedge.FedAvg(made(build).to(dtype), epochs=2, batch_size=3, lr=0.1)


MLP: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))  # noqa: E731


@pytest.mark.parametrize("way", ["single", "plain"])
@pytest.mark.parametrize("build", [chain, Net, MLP])
def test_runs_have_the_layers_in_c_unless_told_otherwise(build: Callable[[], nn.Module], way: Any) -> None:
    own = algorithm(build, torch.float64)
    links = {flag: Simulator(own, shared(), way=way, compile=flag) for flag in (None, False)}
    ends = {flag: fedge.train(own, shared(), rounds=3, link=link).params for flag, link in links.items()}
    assert ["layers" in link.settings() for link in links.values()] == [True, False]
    assert 0 < close(*ends.values()) < 1e-10


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("build", [chain, Net, MLP])
def test_a_run_goes_on_as_it_began(build: Callable[[], nn.Module], tmp_path: Path, workers: int) -> None:
    goes_on_as_it_began(algorithm(build, torch.float32), shared(), tmp_path, way="single", workers=workers)


def test_a_chain_with_large_layers_is_measured() -> None:
    """Stacked, or one client after another in C: neither is always faster."""
    assert Simulator(algorithm(MLP, torch.float32), shared(), workers=1).way is None
    small = fedge.FedAvg(fedge.models.mlp(64, (32,), 10, seed=0), epochs=1)
    assert Simulator(small, shared(), workers=1).way == "stacked"


def test_without_a_compiler_torch_computes_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nothing(text: str) -> Any:
        raise NoCompiler("no C compiler")

    for module in (c_conv, c_linear, c_norm, c_pooled):
        monkeypatch.setattr(module, "load", nothing)
    monkeypatch.setattr(once, "_TOLD", set())
    forget(*CACHED)
    with caplog.at_level(logging.INFO, "fedge"):
        run = fedge.train(algorithm(chain, torch.float64), shared(), rounds=1, engine=fedge.Engine(workers=1))
    forget(*CACHED)
    said = [line for line in caplog.text.splitlines() if "no C compiler" in line]
    assert len([line for line in said if "linear layers are computed by torch's operations" in line]) == 1
    assert len([line for line in said if "convolutions are computed by torch's operations" in line]) >= 1
    assert run.history[0]["dropped"] == []
