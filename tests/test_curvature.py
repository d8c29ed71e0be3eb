"""Fisher diagonal and curvature products against one gradient per example and explicit matrices."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedge.core import Batch
from fedge.handle import Handle, cross_entropy, parameters
from fedge.handle.fisher_diagonal import separable
from tests.cases import close, generator
from tests.reference.curvature import fisher_diagonal, fisher_product, gauss_newton_product


class Attentive(nn.Module):
    """Layers without a rule, a linear layer on a sequence, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.twice = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        x = self.norm(self.embed(x))
        x = self.twice(torch.tanh(self.twice(x))) * self.scale
        return self.out(x.mean(1))


def conv1d() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 4, 3))


MODELS = {
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "no_bias": (lambda: nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3)), (5,)),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 4, (3, 2), padding=(0, 1), bias=False),
            nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(20, 3),
        ),
        (2, 8, 9),
    ),
    "groups": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3, groups=2, dilation=2), nn.Tanh(), nn.Conv2d(8, 8, 1, groups=8), nn.Flatten(),
            nn.Linear(8 * 4, 3),
        ),
        (4, 6, 6),
    ),
    "conv1d": (conv1d, (3, 7)),
    "same_padding": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding="same"), nn.Flatten(), nn.Linear(32, 3)),
        (1, 4, 4),
    ),
    "sequence": (Attentive, (5, 4)),
}  # fmt: skip


def case(name: str, examples: int = 7):
    build, shape = MODELS[name]
    torch.manual_seed(0)
    module = build().double()
    g = generator(3)
    x = torch.randn(examples, *shape, generator=g, dtype=torch.float64)
    y = torch.randint(0, 3, (examples,), generator=g)
    v = {n: torch.randn(p.shape, generator=g, dtype=p.dtype) for n, p in parameters(module).items()}
    return module, x, y, v


def batch(x, y, real: int | None = None) -> Batch:
    mask = torch.arange(len(y)) < (len(y) if real is None else real)
    return Batch(x, y, mask, torch.tensor(0))


@pytest.mark.parametrize("name", MODELS)
def test_fisher_diagonal_against_one_gradient_an_example(name: str) -> None:
    module, x, y, _ = case(name)
    found = Handle(module, cross_entropy).sum_sq_grad(parameters(module), batch(x, y))
    expected = {n: len(y) * leaf for n, leaf in fisher_diagonal(module, x, y).items()}
    assert close(found, expected) < 1e-10


@pytest.mark.parametrize("name", MODELS)
def test_products_against_explicit_matrices(name: str) -> None:
    module, x, y, v = case(name)
    handle, params = Handle(module, cross_entropy), parameters(module)
    fisher = handle.sum_fisher_product(params, batch(x, y), v)
    assert close(fisher, {n: len(y) * leaf for n, leaf in fisher_product(module, x, y, v).items()}) < 1e-10
    newton = handle.sum_gauss_newton_product(params, batch(x, y), v)
    assert close(newton, {n: len(y) * leaf for n, leaf in gauss_newton_product(module, x, y, v).items()}) < 1e-10


@pytest.mark.parametrize("name", MODELS)
def test_padding_counts_for_nothing_and_jobs_can_be_stacked(name: str) -> None:
    module, x, y, v = case(name)
    handle, params = Handle(module, cross_entropy), parameters(module)
    stacked = batch(torch.stack([x, x.flip(0)]), torch.stack([y, y.flip(0)]))
    stacked = stacked._replace(mask=torch.arange(7).expand(2, 7) < torch.tensor([[7], [4]]), key=torch.arange(2))
    calls = {
        "diagonal": lambda b: handle.sum_sq_grad(params, b),
        "fisher": lambda b: handle.sum_fisher_product(params, b, v),
        "gauss_newton": lambda b: handle.sum_gauss_newton_product(params, b, v),
    }
    for call in calls.values():
        both = torch.func.vmap(call)(stacked)
        assert close({n: leaf[0] for n, leaf in both.items()}, call(batch(x, y))) < 1e-10
        assert close({n: leaf[1] for n, leaf in both.items()}, call(batch(x.flip(0)[:4], y.flip(0)[:4]))) < 1e-10


def test_which_parameters_have_a_rule() -> None:
    module, x, y, _ = case("sequence")
    handle = Handle(module, cross_entropy)
    names = separable(handle, parameters(module), batch(x, y))
    assert names == ["embed.weight", "embed.bias", "out.weight", "out.bias"]
    module, x, y, _ = case("conv")
    assert len(separable(Handle(module, cross_entropy), parameters(module), batch(x, y))) == 5


class Alive(TorchDispatchMode):
    """The largest number of tensors of at least this size that were alive at the same time."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.refs, self.most = size, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.refs += [weakref.ref(leaf) for leaf in tree_leaves(out) if getattr(leaf, "numel", int)() >= self.size]
        self.refs = [ref for ref in self.refs if ref() is not None]
        storages = {ref().untyped_storage().data_ptr() for ref in self.refs}
        self.most = max(self.most, len(storages))
        return out


def test_only_one_layers_gradients_are_alive_at_a_time() -> None:
    """Six layers of equal size: the patches, the gradients of each example and their squares exist for one of them."""
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.Tanh())]
    module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 3))
    x, y = torch.randn(64, 16, 4, 4, generator=generator()), torch.zeros(64, dtype=torch.long)
    handle, params = Handle(module, cross_entropy), parameters(module)
    handle.sum_sq_grad(params, batch(x, y))
    with Alive(64 * params["0.weight"].numel()) as alive:
        handle.sum_sq_grad(params, batch(x, y))
    assert 1 <= alive.most <= 3
    with Alive(64 * params["0.weight"].numel()) as naive:
        torch.func.vmap(
            torch.func.grad(lambda p, x, y: cross_entropy(handle.logits(p, x[None]), y[None])[0]), (None, 0, 0)
        )(params, x, y)
    assert naive.most >= 6  # what it is compared with: one gradient per example for the whole network


class Tied(nn.Module):
    """Biases whose weights have no rule, and rows that are not examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.steps, self.late, self.out = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        folded = torch.tanh(self.steps(x.flatten(0, 1))).unflatten(0, x.shape[:2])  # [B * T, F]
        late = self.late(folded.transpose(0, 1)).transpose(0, 1)  # [T, B, F]
        return self.out(torch.tanh(late).mean(1))


def test_what_a_rule_gets_wrong_falls_back_to_one_gradient_an_example() -> None:
    torch.manual_seed(0)
    module = Tied().double()
    g = generator(3)
    x, y = torch.randn(6, 3, 4, generator=g, dtype=torch.float64), torch.randint(0, 3, (6,), generator=g)
    handle, params = Handle(module, cross_entropy), parameters(module)
    found = handle.sum_sq_grad(params, batch(x, y))
    assert close(found, {n: 6 * leaf for n, leaf in fisher_diagonal(module, x, y).items()}) < 1e-10
    assert separable(handle, params, batch(x, y)) == ["out.weight", "out.bias"]
