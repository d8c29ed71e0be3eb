"""A convolution and its pool in C: the gradients of autograd, and only where they are wanted and possible."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedge
from fedge.core import Batch
from fedge.engine import Simulator
from fedge.engine.recording import c_pooled, pooled_layer
from fedge.engine.recording.c_library import NoCompiler, there_is_a_compiler
from fedge.engine.recording.c_pooled import Geometry, pooled, slopes
from fedge.engine.recording.pooled_layer import PooledConv, joined
from fedge.handle import Handle, WrittenHandle, parameters
from fedge.losses import cross_entropy
from tests.cases import close, generator, goes_on_as_it_began
from tests.in_c import drawn, fresh_cache

pytestmark = pytest.mark.skipif(not there_is_a_compiler(), reason="no C compiler on this machine")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


own_cache = fresh_cache(c_pooled.program)


# channels, outputs, height, width, kernel, padding, pool
SIZES: list[tuple[int, int, int, int, tuple[int, int], tuple[int, int], tuple[int, int]]] = [
    (1, 16, 28, 28, (5, 5), (2, 2), (2, 2)),
    (16, 32, 14, 14, (5, 5), (2, 2), (2, 2)),
    (5, 7, 11, 9, (3, 2), (1, 0), (2, 3)),  # a pool that leaves the edge out, sides that are no whole vectors
    (3, 1, 6, 8, (1, 3), (0, 1), (1, 2)),
    (40, 9, 5, 5, (3, 3), (1, 1), (2, 2)),  # more vectors than registers
    (2, 3, 4, 4, (4, 4), (0, 0), (1, 1)),
]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("into", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_pool_and_all_gradients_are_autograds(sizes: Any, into: bool, dtype: torch.dtype, limit: float) -> None:
    of = Geometry(*sizes, dtype=dtype)
    channels, outputs, height, width, kernel, padding, pool = sizes
    x, weight = drawn(4, channels, height, width, seed=0), drawn(outputs, channels, *kernel, seed=1)
    x[0] = 1.5  # a flat picture: every window is a tie
    own = [one.requires_grad_() for one in (weight, drawn(outputs, seed=2), x)]
    z = F.conv2d(own[2], own[0], own[1], padding=padding)
    expected = F.relu(F.max_pool2d(z, pool))
    g = drawn(*expected.shape, seed=3)
    wanted = torch.autograd.grad(expected, own, g)
    out, at = pooled(z.detach().to(dtype), of.numbers)
    assert float((F.relu(out) - expected.detach()).abs().max()) <= limit
    behind = (g * (expected > 0)).to(dtype)
    found = slopes(behind, at, x.detach().to(dtype), weight.detach().to(dtype), [*of.numbers, int(into)])
    assert len(found) == 2 + into
    for a, b in zip(found, wanted, strict=False):
        assert float((a - b).abs().max()) <= limit * float(b.abs().max())


def test_the_first_of_equal_values_counts_and_nan_is_passed_on() -> None:
    """As torch's own pool has it."""
    z = torch.tensor([[1.0, 1.0, 2.0, torch.nan], [1.0, 0.0, torch.nan, 3.0]]).expand(1, 20, 2, 4)
    of = Geometry(1, 20, 2, 4, (1, 1), (0, 0), (2, 2), torch.float32)
    out, at = pooled(z, of.numbers)
    expected, places = torch.ops.aten.max_pool2d_with_indices(z, [2, 2])
    torch.testing.assert_close(out, expected, equal_nan=True)
    assert torch.equal(at.long()[0, 0, 0, :1], places[0, 0, 0, :1])


def chain(seed: int = 0) -> nn.Module:
    """Two pools behind convolutions, one behind a ReLU; and a convolution without a pool."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3, bias=False),
            nn.MaxPool2d((1, 2)), nn.Tanh(), nn.Conv2d(5, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(9, 10),
        ).double()  # fmt: skip


def handles() -> tuple[Handle, WrittenHandle]:
    written = WrittenHandle(chain(), cross_entropy)
    written.program.alone = joined(written.program.layers)
    return Handle(chain(), cross_entropy), written


def batch() -> Batch:
    labels = torch.randint(0, 10, (6,), generator=generator(1))
    mask = torch.tensor([True] * 5 + [False])
    return Batch(drawn(6, 1, 12, 12, seed=0), labels, mask, torch.tensor(3))


def test_the_gradient_of_a_chain_is_autograds(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, written = handles()
    assert [type(layer) for layer in written.program.alone].count(PooledConv) == 2
    calls: list[Any] = []
    monkeypatch.setattr(pooled_layer, "pooled", lambda *args: (calls.append(args), pooled(*args))[1])
    params = parameters(chain())
    expected = plain.grad(params, batch())
    assert close(expected, written.grad(params, batch())) < 1e-12
    assert len(calls) == 2
    torch.set_num_threads(2)  # several threads for one client are torch's
    assert close(expected, written.grad(params, batch())) < 1e-12
    assert len(calls) == 2


def shared() -> fedge.Federation:
    x, y = drawn(60, 1, 12, 12, seed=4), torch.arange(60) % 10
    data = fedge.data.Data(x, y, x[:10], y[:10], 10)
    return fedge.Federation(data, [list(range(k * 10, k * 10 + 10 - k)) for k in range(6)])


def algorithm(dtype: torch.dtype) -> fedge.FedAvg:
    return fedge.FedAvg(chain().to(dtype), epochs=2, batch_size=3, lr=0.1)


def test_runs_use_it_unless_told_otherwise() -> None:
    own = algorithm(torch.float64)
    links = {flag: Simulator(own, shared(), compile=flag) for flag in (None, False)}
    ends = {flag: fedge.train(own, shared(), rounds=3, link=link).params for flag, link in links.items()}
    assert ["layers" in link.settings() for link in links.values()] == [True, False]
    assert 0 < close(*ends.values()) < 1e-10


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_goes_on_as_it_began(tmp_path: Path, workers: int) -> None:
    goes_on_as_it_began(algorithm(torch.float32), shared(), tmp_path, workers=workers)


def test_without_a_compiler_torch_computes_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nothing(text: str) -> Any:
        raise NoCompiler("no C compiler")

    monkeypatch.setattr(c_pooled, "load", nothing)
    monkeypatch.setattr(pooled_layer, "_REFUSED", set())
    c_pooled.program.cache_clear()
    plain, written = handles()
    params = parameters(chain())
    with caplog.at_level(logging.INFO, "fedge"):
        assert close(plain.grad(params, batch()), written.grad(params, batch())) < 1e-12
    assert "convolutions are computed by torch's operations: no C compiler" in caplog.text


def test_large_weights_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they outweigh the batch: images then lie with a channel's pixels side by side."""
    layer = joined(WrittenHandle(chain(), cross_entropy).program.layers)[0]
    assert isinstance(layer, PooledConv)
    weight, x = torch.zeros(4, 1, 3, 3), torch.zeros(2, 1, 12, 12)
    assert layer._geometry(x, weight) is not None
    assert layer._geometry(x.half(), weight.half()) is None
    assert layer._geometry(x[:, :, :1, :1], weight) is None
