"""What you add is one file: a local optimiser and a partition, written here as you would write them.

The others of the list are where their kind is tested: a layer with a written gradient in test_layers.py, a rule for
combining in test_combine.py, a codec in test_codecs.py, an algorithm with memory in test_memory.py, links that lose,
delay or record in lossy.py and test_around.py.
"""

from __future__ import annotations

import inspect
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import fedge
from fedge import tree
from fedge.algorithms.optimisers import Moments, Optimiser
from fedge.core import Algorithm, Codec, Combine, Params
from fedge.engine import Around, BaseLink, Loopback, Simulator
from fedge.experiment import build, parse
from fedge.experiment.parts import PARTITIONS
from fedge.handle.layer import Layer
from tests import lossy, test_codecs, test_combine, test_layers, test_memory
from tests.cases import close, ragged, toy_data, toy_model


@dataclass(frozen=True)
class Lion:
    """Chen et al., Symbolic Discovery of Optimization Algorithms, NeurIPS 2023.

    w <- w - lr sign(b1 m + (1 - b1) g);  m <- b2 m + (1 - b2) g
    """

    betas: tuple[float, float] = (0.9, 0.99)

    def start(self, params: Params) -> Moments:
        return {"m": tree.zeros_like(params)}

    def step(
        self, params: Params, grad: Params, state: Moments, lr: float, factor: Tensor | None = None
    ) -> tuple[Params, Moments]:
        b1, b2 = self.betas
        size = lr if factor is None else lr * factor
        moved = tree.map_(lambda w, m, g: w - size * torch.sign(b1 * m + (1 - b1) * g), params, state["m"], grad)
        return moved, {"m": tree.map_(lambda m, g: b2 * m + (1 - b2) * g, state["m"], grad)}


def with_lion(**options) -> fedge.FedAvg:
    return fedge.FedAvg(toy_model(), lr=0.02, epochs=2, batch_size=4, optimiser=Lion(), **options)


@pytest.mark.parametrize("options", [{}, {"lr_decay": 0.7, "inner_decay": 0.3, "clip": 0.5}])
def test_a_local_optimiser_agrees_on_all_links(options: dict) -> None:
    algorithm, federation = with_lion(**options), ragged(toy_data())
    links = [
        Simulator(algorithm, federation),
        Simulator(algorithm, federation, chunk=1),
        Loopback(algorithm, federation),
    ]
    runs = [fedge.train(algorithm, federation, rounds=3, cohort=5, seed=3, link=link) for link in links]
    assert all(close(runs[0].params, run.params) < 1e-10 for run in runs[1:])


def test_a_local_optimiser_is_that_of_a_plain_loop() -> None:
    """One client, full batches: FedAvg is then local training alone."""
    data = toy_data()
    federation = fedge.Federation(data, [np.arange(len(data.train_y))])
    algorithm = fedge.FedAvg(toy_model(), lr=0.02, epochs=7, batch_size=None, optimiser=Lion())
    run = fedge.train(algorithm, federation, rounds=1)
    model = toy_model()
    moments = [torch.zeros_like(leaf) for leaf in model.parameters()]
    for _ in range(7):
        grads = torch.autograd.grad(fedge.cross_entropy(model(data.train_x), data.train_y).mean(), model.parameters())
        with torch.no_grad():
            for leaf, m, g in zip(model.parameters(), moments, grads, strict=True):
                leaf -= 0.02 * torch.sign(0.9 * m + 0.1 * g)
                m.mul_(0.99).add_(g, alpha=0.01)
    assert close(run.params, {name: leaf.detach() for name, leaf in model.named_parameters()}) < 1e-12


def test_a_local_optimiser_is_in_the_run_folder_and_at_the_server(tmp_path: Path) -> None:
    algorithm = with_lion(server_optimiser=Lion((0.5, 0.5)), server_lr=0.01)
    whole = fedge.train(algorithm, ragged(toy_data()), rounds=4, out=tmp_path / "whole")
    for rounds in (2, 4):
        parts = fedge.train(algorithm, ragged(toy_data()), rounds=rounds, out=tmp_path / "parts", resume=rounds == 4)
    assert close(whole.params, parts.params) == 0
    config = tomllib.loads((tmp_path / "whole/config.toml").read_text())["algorithm"]
    assert config["optimiser"] == {"name": "lion", "betas": [0.9, 0.99]}


class Plain:
    """Not a dataclass: its name is all that the record can hold."""

    start, step, betas = Lion.start, Lion.step, (0.9, 0.99)


def test_another_process_may_go_on_with_a_plain_class(tmp_path: Path) -> None:
    for rounds in (1, 2):  # a new object each time, as in a new process
        algorithm = fedge.FedAvg(toy_model(), epochs=1, optimiser=Plain())
        fedge.train(algorithm, ragged(toy_data()), rounds=rounds, out=tmp_path / "a", resume=rounds == 2)
    config = tomllib.loads((tmp_path / "a/config.toml").read_text())["algorithm"]
    assert config["optimiser"] == {"name": "plain"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 0.5}, r"momentum is 0.5, but optimiser=Lion\(...\) has its own"),
        ({"carry_momentum": True}, "carry_momentum is true, but there is none"),
        ({"server_optimiser": torch.optim.SGD}, "server_optimiser is"),
    ],
)
def test_what_an_optimiser_does_not_go_with(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_lion(**options)


def stairs(y: NDArray[np.int64], clients: int, seed: int) -> list[NDArray[np.int64]]:
    """Client k holds k + 1 examples for every one of client 0."""
    order = np.random.default_rng(seed).permutation(len(y))
    shares = np.cumsum(np.arange(1, clients + 1)) / (clients * (clients + 1) / 2)
    return np.split(order, np.round(shares[:-1] * len(y)).astype(int))


def test_a_partition_is_a_function() -> None:
    data = toy_data()
    lists = stairs(data.train_y.numpy(), 5, seed=0)
    federation = fedge.Federation(data, lists)
    assert federation.sizes.tolist() == [6, 12, 18, 24, 30]
    run = fedge.train(fedge.FedAvg(toy_model(), epochs=1), federation, rounds=2)
    assert run.rounds == 2


def test_a_partition_by_its_name_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one line in fedge/partition/__init__.py does."""
    monkeypatch.setitem(PARTITIONS, "stairs", stairs)
    tables = {
        "data": {"name": "digits"},
        "partition": {"kind": "stairs", "clients": 10, "seed": 0},
        "model": {"name": "mlp"},
        "algorithm": [{"name": "fedavg"}],
        "train": {"rounds": 1},
    }
    sizes = build(parse(tables), fedge.data.load("digits")).federation.sizes.tolist()
    assert sizes == sorted(sizes)
    assert sizes[-1] > 9 * sizes[0]


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        (Layer, test_layers.Scale),
        (Combine, test_combine.Smallest),
        (Codec, test_codecs.Sign),
        (Algorithm, test_memory.Counting),
        (Around, lossy.Lossy),
        (BaseLink, lossy.Slow),
        (Optimiser, Lion),
    ],
)
def test_one_of_each_is_added_in_the_tests(kind: type, written: type) -> None:
    assert written.__module__.startswith("tests.")
    assert isinstance(written(), kind) if kind is Optimiser else issubclass(written, kind)


def test_they_are_short() -> None:
    for written in (stairs, Lion, test_layers.Scale, test_combine.Smallest, test_codecs.Sign, lossy.Lossy):
        assert len(inspect.getsourcelines(written)[0]) <= 40, written.__name__
