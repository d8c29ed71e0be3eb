"""FOOF against a plain float64 loop with dense inverses, and what its handle sees of a network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedge
from fedge.core import Batch
from fedge.engine import Simulator
from fedge.handle import GraphHandle, Handle
from fedge.handle.layer_inputs import sides
from fedge.losses import by_target
from tests.against import clients_of, cohorts_of, order_of
from tests.cases import close, ragged, toy_data, toy_model
from tests.reference.fedova import fedova
from tests.reference.foof import foof, preconditioners

COMMON = {"lr": 0.1, "epochs": 2, "batch_size": 4, "damping": 0.2}
OPTIONS = {
    "plain": {},
    "full_batch": {"batch_size": None},
    "small_layers": {"largest_side": 6},  # 6 inputs and the 1 are too many, 5 and the 1 are not
    "more": {"momentum": 0.5, "clip": 0.5, "server_lr": 0.7, "server_momentum": 0.4, "damping": 2.0},
}


def convolutions() -> nn.Module:
    """Of one and of two dimensions, with and without a bias, strides and padding; a norm and a residual are beside."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.line = nn.Conv1d(1, 4, 2, padding=1, stride=2)
            self.plane = nn.Conv2d(1, 3, (2, 1), stride=(1, 2), padding=(1, 0), bias=False)
            self.norm = nn.LayerNorm(4)
            self.last = nn.Linear(30, 3)

        def forward(self, x: Tensor) -> Tensor:
            a = torch.tanh(self.line(x.unsqueeze(1)))  # [B, 4, 4]
            b = torch.tanh(self.plane(self.norm(a).unsqueeze(1)))  # [B, 3, 5, 2]
            return self.last(b.flatten(1))

    return Net().double()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("model", [toy_model, convolutions])
def test_foof_against_the_plain_loop(name: str, model) -> None:
    options = COMMON | OPTIONS[name]
    federation = ragged(toy_data())
    run = fedge.train(fedge.FOOF(model(), **options), federation, rounds=3, cohort=5, seed=9)
    cohorts, order = cohorts_of(federation, 3, 5, seed=9), order_of(federation, 9)
    assert close(run.params, foof(model(), clients_of(federation), cohorts, order, **options)) < 1e-10


def test_under_fedova_against_the_plain_loop() -> None:
    federation = ragged(toy_data())
    algorithm = fedge.FedOVA(fedge.FOOF(toy_model(outputs=2), **COMMON), classes=3)
    run = fedge.train(algorithm, federation, rounds=3, cohort=5, seed=9)
    cohorts, order = cohorts_of(federation, 3, 5, seed=9), order_of(federation, 9)
    expected = fedova(foof, toy_model(outputs=2), clients_of(federation), cohorts, order, 3, **COMMON)
    assert close(run.params, expected) < 1e-10


@pytest.mark.parametrize("model", [toy_model, convolutions])
@pytest.mark.parametrize("way", ["stacked", "single", "plain"])
def test_every_way_of_computing_clients_agrees(model, way: str) -> None:
    federation, algorithm = ragged(toy_data()), fedge.FOOF(model(), **COMMON)
    options = {"rounds": 3, "cohort": 5, "seed": 9}
    expected = fedge.train(algorithm, federation, link=Simulator(algorithm, federation, written=False), **options)
    found = fedge.train(algorithm, federation, engine=fedge.Engine(way=way), **options)
    assert close(found.params, expected.params) < 1e-10


@pytest.mark.parametrize("handle", [Handle, GraphHandle])
def test_padding_is_not_seen(handle) -> None:
    module, data = convolutions(), toy_data()
    known, params = handle(module, by_target), {name: leaf.detach() for name, leaf in module.named_parameters()}
    x, y, key = data.train_x[:7], data.train_y[:7], torch.zeros((), dtype=torch.long)
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    seen = known.sum_inputs(params, Batch(x, y, mask, key), 1024)
    alone = known.sum_inputs(params, Batch(x[mask], y[mask], mask[mask], key), 1024)
    assert seen.keys() == {"line.weight", "plane.weight", "last.weight"}
    assert close(seen, alone) < 1e-12
    assert float(seen["last.weight"][-1, -1]) == 5


def test_a_large_damping_is_fedavg() -> None:
    federation, options = ragged(toy_data()), {"lr": 0.1, "epochs": 2, "batch_size": 4}
    runs = [
        fedge.train(algorithm, federation, rounds=3, cohort=5, seed=9)
        for algorithm in (fedge.FOOF(toy_model(), damping=1e9, **options), fedge.FedAvg(toy_model(), **options))
    ]
    assert close(runs[0].params, runs[1].params) < 1e-7
    small = fedge.train(fedge.FOOF(toy_model(), damping=0.1, **options), federation, rounds=3, cohort=5, seed=9)
    assert close(small.params, runs[1].params) > 1e-3


def test_one_step_on_least_squares_is_newtons() -> None:
    """With squared losses of one layer A is the Gauss-Newton matrix: without damping one full step solves it."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=g, dtype=torch.float64)
    y = x @ torch.randn(4, 2, generator=g, dtype=torch.float64) + 0.3
    data = fedge.data.Data(x, y, x[:5], y[:5], 0)
    federation = fedge.Federation(data, [torch.arange(40).numpy()])
    model = nn.Linear(4, 2).double()
    p = preconditioners(model, x, 1e-9, 99)[""]
    one = torch.cat([x, torch.ones(40, 1, dtype=torch.float64)], 1)
    c = torch.trace(one.mT @ one / 40) / 5
    assert float((p - c * torch.linalg.inv(one.mT @ one / 40)).abs().max()) < 1e-6
    algorithm = fedge.FOOF(model, lr=float(1 / c), damping=1e-9, epochs=1, batch_size=None, loss=fedge.losses.mse)
    run = fedge.train(algorithm, federation, rounds=1, seed=0)
    assert float((x @ run.params["weight"].mT + run.params["bias"] - y).abs().max()) < 1e-5


def test_what_cannot_be_preconditioned_is_said() -> None:
    federation = ragged(toy_data())
    with pytest.raises(ValueError, match="fewer than 3 inputs: raise largest_side, or use FedAvg"):
        fedge.train(fedge.FOOF(toy_model(), largest_side=3), federation, rounds=1)
    with pytest.raises(ValueError, match="FOOF preconditions the steps of SGD"):
        fedge.FOOF(toy_model(), optimiser="adam")
    with pytest.raises(ValueError, match="damping is 0"):
        fedge.FOOF(toy_model(), damping=0)
    with pytest.raises(ValueError, match="largest_side is 0"):
        fedge.FOOF(toy_model(), largest_side=0)


def test_the_largest_layer_of_the_image_network_takes_plain_steps() -> None:
    """1,568 inputs are too many for an inverse at every client; 512 and the 1 are not."""
    model = fedge.models.fmnist_cnn(seed=0)
    found = sides(dict(model.named_parameters()), fedge.FOOF(model).largest_side)
    assert list(found.values()) == [26, 401, 513]
