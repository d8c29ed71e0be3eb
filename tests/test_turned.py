"""Images with the channels of a pixel side by side: the same gradients, and only where nobody can see it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedge
from fedge.core import Batch
from fedge.engine import Loopback, Simulator
from fedge.engine.recording import c_norm
from fedge.engine.recording.c_library import NoCompiler, there_is_a_compiler
from fedge.engine.recording.turned_layers import turned_in_c
from fedge.handle import GraphHandle, Handle, parameters
from fedge.handle.turned import is_blind
from fedge.losses import cross_entropy
from tests.cases import close, generator, goes_on_as_it_began
from tests.in_c import drawn, fresh_cache

pytestmark = pytest.mark.skipif(not there_is_a_compiler(), reason="no C compiler on this machine")


own_cache = fresh_cache(c_norm.program)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize(("channels", "groups", "side"), [(16, 8, 9), (20, 4, 5), (3, 3, 4), (37, 1, 3), (64, 64, 2)])
def test_group_norm_and_its_gradients_are_torch_s(
    channels: int, groups: int, side: int, dtype: torch.dtype, limit: float
) -> None:
    x = 3 + drawn(4, channels, side, side, seed=0)
    own = [one.requires_grad_() for one in (x, drawn(channels, seed=1), drawn(channels, seed=2))]
    y = F.group_norm(own[0], groups, own[1], own[2], 0.01)
    g = drawn(*y.shape, seed=3)
    expected = (y.detach(), *torch.autograd.grad(y, own, g))
    mine = [one.detach().to(dtype).requires_grad_() for one in own]
    turned = mine[0].contiguous(memory_format=torch.channels_last)
    out = c_norm.group_norm(turned, groups, mine[1], mine[2], 0.01)
    assert out.is_contiguous(memory_format=torch.channels_last)
    found = (out.detach(), *torch.autograd.grad(out, mine, g.to(dtype)))
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).abs().max()) <= limit * float(b.abs().max())


class Net(nn.Module):
    """A residual net; `end` is how it comes from images to vectors."""

    def __init__(self, end: Callable[[Tensor], Tensor], inputs: int = 1, wide: int = 6, affine: bool = True) -> None:
        super().__init__()
        self.stem, self.end = nn.Conv2d(inputs, 4, 3, padding=1), end
        self.down, self.short = nn.Conv2d(4, wide, 3, 2, 1), nn.Conv2d(4, wide, 1, 2)
        self.norms = nn.ModuleList([nn.GroupNorm(2, 4), nn.GroupNorm(3, wide, affine=affine)])
        self.out = nn.Linear(wide * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.stem(x)))
        x = F.relu(self.norms[1](self.down(x)) + self.short(x))
        found: Tensor = self.out(self.end(x))
        return found


class Written(Net):
    """Writes into what it views: with a copy in place of the view, it would compute something else."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.relu(self.stem(x)))
        F.relu(x.view(x.size(0), -1), inplace=True)
        found: Tensor = self.out(x.flatten(1))
        return found


class Branches(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(-x if x.sum() > 0 else x)


def flat(x: Tensor) -> Tensor:
    return x.flatten(1)


def turned_image(channels: int = 8, dtype: torch.dtype = torch.float64) -> Tensor:
    return drawn(4, channels, 5, 5, seed=0).to(dtype).contiguous(memory_format=torch.channels_last)


def test_the_second_derivative_of_a_group_norm_is_torch_s() -> None:
    found = []
    for norm in (c_norm.group_norm, F.group_norm):
        own = [one.requires_grad_() for one in (turned_image(), drawn(8, seed=1), drawn(8, seed=2))]
        y = norm(own[0], 4, own[1], own[2], 0.01)
        slopes = torch.autograd.grad(y.sin().sum(), own, create_graph=True)
        found.append(torch.autograd.grad(sum(one.square().sum() for one in slopes), own))
    for a, b in zip(*found, strict=True):
        assert float((a - b).abs().max()) < 1e-10 * float(b.abs().max())


WRONG: dict[str, tuple[int, Tensor, Tensor]] = {
    "few weights": (4, torch.ones(4).double(), torch.zeros(8).double()),
    "few biases": (4, torch.ones(8).double(), torch.zeros(4).double()),
    "groups": (3, torch.ones(8).double(), torch.zeros(8).double()),
    "type": (4, torch.ones(8), torch.zeros(8)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_group_norm_that_torch_refuses_is_refused(name: str) -> None:
    groups, weight, bias = WRONG[name]
    with pytest.raises(RuntimeError):
        c_norm.group_norm(turned_image(), groups, weight, bias)


class TwoHeads(nn.Module):
    """What the first head overwrites is a view of what the second reads, or may be a copy of it."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.GroupNorm(4, 8)
        self.first, self.line = first, nn.Linear(128, 10)
        self.second = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.down(x))
        return self.line(self.first(x)) + self.second(x)


class Relu(nn.Module):
    def __init__(self, flatten: Callable[[Tensor], Tensor], *flags: Any, **named: Any) -> None:
        super().__init__()
        self.flatten, self.flags, self.named = flatten, flags, named

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.flatten(x), *self.flags, **self.named)


BLIND: dict[str, Callable[[], nn.Module]] = {
    "flatten": lambda: Net(flat),
    "view": lambda: Net(lambda x: x.view(x.size(0), -1)),
    "three channels": lambda: Net(flat, inputs=3),
    "no scale": lambda: Net(flat, affine=False),
    "heavy": lambda: Net(flat, wide=48),  # weights outweigh a batch: the last convolutions have rows of pixels
}
BLIND |= {
    "overwritten before it is flat": lambda: TwoHeads(nn.Sequential(nn.ReLU(inplace=True), nn.Flatten())),
    "overwritten elsewhere": lambda: TwoHeads(nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(inplace=True), nn.Flatten())),
}
SEEING: dict[str, Callable[[], nn.Module]] = {
    "overwritten when it is flat": lambda: TwoHeads(nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True))),
    "the same by functions": lambda: TwoHeads(Relu(lambda x: torch.flatten(x, 1), inplace=True)),
    "the same by a flag without a name": lambda: TwoHeads(Relu(flat, True)),
    "the same behind an identity": lambda: TwoHeads(nn.Sequential(nn.Flatten(), nn.Identity(), nn.ReLU(inplace=True))),
    "strides": lambda: Net(lambda x: x.flatten(1) * x.stride(1)),
    "unknown function": lambda: Net(lambda x: torch.fft.fft(x).real.flatten(1)),
    "written through a view": lambda: Written(flat),
    "branches": lambda: Branches(flat),
    "no images": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
}


def made(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().double()


@pytest.mark.parametrize("name", [*BLIND, *SEEING])
def test_only_models_that_cannot_see_it_are_turned(name: str) -> None:
    assert is_blind(made((BLIND | SEEING)[name])) is (name in BLIND)
    assert bool(turned_in_c(made((BLIND | SEEING)[name]))) is (name in BLIND)


@pytest.mark.parametrize("name", BLIND)
def test_the_gradient_is_autograds(name: str) -> None:
    plain, turned = Handle(made(BLIND[name]), cross_entropy), GraphHandle(made(BLIND[name]), cross_entropy)
    turned.program.alone = turned_in_c(made(BLIND[name]))
    labels = torch.randint(0, 10, (5,), generator=generator(1))
    x = drawn(5, 3 if name == "three channels" else 1, 8, 8, seed=0)
    batch = Batch(x, labels, torch.tensor([True] * 4 + [False]), torch.tensor(3))
    params = parameters(made(BLIND[name]))
    lies: list[bool] = []
    turned.module.down.register_forward_pre_hook(  # type: ignore[union-attr]
        lambda layer, args: lies.append(args[0].is_contiguous(memory_format=torch.channels_last))
    )
    assert close(plain.grad(params, batch), turned.grad(params, batch)) < 1e-12
    assert lies == [True]


@pytest.mark.parametrize("name", ["overwritten when it is flat", "overwritten before it is flat"])
@pytest.mark.parametrize("way", ["stacked", "single", "plain"])
def test_what_is_overwritten_through_another_view_is_what_autograd_sees(name: str, way: Any) -> None:
    own = fedge.FedAvg(made((BLIND | SEEING)[name]), epochs=1, batch_size=3, lr=0.1)
    found = fedge.train(own, shared(), rounds=2, link=Simulator(own, shared(), way=way))
    assert close(found.params, fedge.train(own, shared(), rounds=2, link=Loopback(own, shared())).params) < 1e-10


def shared() -> fedge.Federation:
    x, y = drawn(60, 1, 8, 8, seed=4), torch.arange(60) % 10
    data = fedge.data.Data(x, y, x[:10], y[:10], 10)
    return fedge.Federation(data, [list(range(k * 10, k * 10 + 10 - k)) for k in range(6)])


def algorithm(dtype: torch.dtype) -> fedge.FedAvg:
    return fedge.FedAvg(made(BLIND["flatten"]).to(dtype), epochs=2, batch_size=3, lr=0.1)


@pytest.mark.parametrize("way", ["single", "plain"])
def test_runs_turn_images_unless_told_otherwise(way: Any) -> None:
    own = algorithm(torch.float64)
    links = {flag: Simulator(own, shared(), way=way, compile=flag) for flag in (None, False)}
    ends = {flag: fedge.train(own, shared(), rounds=3, link=link).params for flag, link in links.items()}
    assert ["layers" in link.settings() for link in links.values()] == [True, False]
    assert 0 < close(*ends.values()) < 1e-10


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_goes_on_as_it_began(tmp_path: Path, workers: int) -> None:
    goes_on_as_it_began(algorithm(torch.float32), shared(), tmp_path, way="single", workers=workers)


def test_without_a_compiler_images_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nothing(text: str) -> Any:
        raise NoCompiler("no C compiler")

    monkeypatch.setattr(c_norm, "load", nothing)
    c_norm.program.cache_clear()
    with caplog.at_level(logging.INFO, "fedge"):
        assert "layers" not in Simulator(algorithm(torch.float32), shared(), way="single").settings()
    c_norm.program.cache_clear()
    assert "convolutions are computed by torch's operations: no C compiler" in caplog.text
