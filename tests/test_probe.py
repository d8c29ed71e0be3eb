"""Modules that are no functions of one example and of their parameters: buffers that change, batches that are mixed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedge
from fedge.engine import Loopback, Simulator
from tests.cases import close, ragged, toy_data, toy_model


class Buffered(nn.Module):
    """`keep` says what becomes of the buffer, from the hidden layer's output."""

    def __init__(self, keep: Callable[[Any, Tensor], None], at_first: Tensor | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.out, self.keep = nn.Linear(6, 8), nn.Linear(8, 3), keep
        self.register_buffer("kept", at_first)

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        self.keep(self, h)
        return self.out(torch.tanh(h - self.kept))


def counts(net: Any, h: Tensor) -> None:
    net.kept += 1


def assigns(net: Any, h: Tensor) -> None:
    net.kept = net.kept + 1


def averages(net: Any, h: Tensor) -> None:
    if net.training:
        net.kept.mul_(0.9).add_(0.1 * h.detach().mean(0))


def caches(net: Any, h: Tensor) -> None:
    if net.kept is None:
        net.kept = torch.linspace(0, 1, 8, dtype=h.dtype)


def leaves(net: Any, h: Tensor) -> None:
    pass


@pytest.mark.parametrize("keep", [counts, assigns, averages])
def test_a_buffer_that_changes_in_forward_is_refused_by_its_name(keep: Callable[[Any, Tensor], None]) -> None:
    model = Buffered(keep, torch.zeros(8)).double()
    with pytest.raises(ValueError, match="the model changes its buffer 'kept' in forward, which is no parameter"):
        fedge.train(fedge.FedAvg(model), ragged(toy_data()), rounds=1)
    assert not model.kept.any(), "the given module is left alone"


@pytest.mark.parametrize(("keep", "first"), [(leaves, torch.ones(8)), (caches, None)])
def test_constants_and_caches_are_buffers_that_stay(keep: Callable[[Any, Tensor], None], first: Tensor | None) -> None:
    algorithm = fedge.FedAvg(Buffered(keep, first).double(), lr=0.1, epochs=1, batch_size=4)
    federation = ragged(toy_data())
    runs = [
        fedge.train(algorithm, federation, rounds=2, seed=3, link=link)
        for link in (Simulator(algorithm, federation), Loopback(algorithm, federation))
    ]
    assert close(runs[0].params, runs[1].params) < 1e-10


class Mixing(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.out, self.mix = nn.Linear(6, 8), nn.Linear(8, 3), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.hidden(x))))


MIXTURES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h - h.mean(0),
    "attention": lambda h: torch.softmax(h @ h.mT, 1) @ h,
    "flip": lambda h: h + h.flip(0),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_model_that_mixes_its_batch_gets_the_batches_as_they_are(name: str, caplog: pytest.LogCaptureFixture) -> None:
    algorithm = fedge.FedAvg(Mixing(MIXTURES[name]).double(), lr=0.1, epochs=2, batch_size=4)
    federation = ragged(toy_data())
    with caplog.at_level(logging.WARNING, "fedge"):
        found = fedge.train(algorithm, federation, rounds=3, seed=3)
    assert "depends on the others of its batch" in caplog.text
    expected = fedge.train(algorithm, federation, rounds=3, seed=3, link=Loopback(algorithm, federation))
    assert close(found.params, expected.params) < 1e-10
    caplog.clear()
    link = Simulator(algorithm, federation, way="stacked")
    assert "way='single' computes them one after another" in caplog.text
    other = fedge.train(algorithm, federation, rounds=3, seed=3, link=link)
    assert close(other.params, expected.params) > 1e-6, "if it does not, the warning is wrong"


@pytest.mark.parametrize(
    "model", [toy_model, lambda: Mixing(torch.relu).double(), lambda: Mixing(nn.Dropout()).double()]
)
def test_nothing_is_said_of_other_models(model: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    algorithm = fedge.FedAvg(model(), lr=0.1, epochs=1, batch_size=4)
    fedge.train(algorithm, ragged(toy_data()), rounds=1)
    assert "its batch" not in caplog.text
