"""A new layer kind is one class and one entry in the table: a layer of one's own, with a written gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

import fedge
from fedge.core import Batch
from fedge.engine import Loopback, Simulator
from fedge.handle import Handle, NotAChain, WrittenHandle, cross_entropy, layers
from fedge.handle.chain import read
from fedge.handle.fisher_diagonal import separable
from fedge.handle.layer import Call, Layer, Squared
from fedge.handle.tape import Many, One, Tape
from tests.cases import close, ragged, toy_data
from tests.reference.curvature import fisher_diagonal
from tests.test_written import CHAINS, stack


class Scaled(nn.Module):
    """Every feature times a number of its own."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, features))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(x, self.weight)


class Scale(Layer):
    """Everything fedge needs to know of it."""

    @classmethod
    def match(cls, call: Call) -> Self | None:
        return cls(call.name) if call.target is Scaled else None

    @property
    def parameters(self) -> tuple[str, ...]:
        return (f"{self.name}.weight",)

    def one(self, tape: One, x: Tensor) -> Tensor:
        return self.apply(tape, x, tape.params[f"{self.name}.weight"], 0)

    def many(self, tape: Many, x: Tensor) -> Tensor:
        return self.apply(tape, x, tape.params[f"{self.name}.weight"].unsqueeze(1), 1)

    def apply(self, tape: Tape, x: Tensor, weight: Tensor, batch: int) -> Tensor:
        tape.is_first()

        def back(g: Tensor) -> Tensor:
            tape.grads[f"{self.name}.weight"] = (g * x).sum(batch)
            return g * weight

        return tape.record(x * weight, back)

    @staticmethod
    def squares(function: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Squared | None:
        return Squared(SquaredScale, args, args[1]) if function is torch.mul else None


class SquaredScale(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, weight: Tensor) -> Tensor:
        return a * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, weight = ctx.saved_tensors
        return grads[0] * weight, (grads[0] * a).square().sum(0)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), Scaled(5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), Scaled(4)).double()


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "KINDS", [*layers.KINDS, Scale])


def batch(module: nn.Module) -> tuple[dict[str, Tensor], Batch]:
    params, found = stack(module, (6,))
    return params, found._replace(y=found.y % 4)


def test_without_its_kind_it_is_left_to_autograd() -> None:
    with pytest.raises(NotAChain, match="beside the chain"):
        read(network())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.usefixtures("known")
def test_its_gradient_is_autograds_for_one_and_for_many(fused: bool) -> None:
    module = network()
    plain, written = Handle(module, cross_entropy), WrittenHandle(module, cross_entropy, fused=fused)
    assert [type(layer) for layer in written.program.layers].count(Scale) == 2
    params, jobs = batch(module)
    assert close(torch.func.vmap(plain.grad)(params, jobs), torch.func.vmap(written.grad)(params, jobs)) < 1e-12
    for job in range(3):
        one, mine = {name: leaf[job] for name, leaf in params.items()}, Batch(*(part[job] for part in jobs))
        assert close(plain.grad(one, mine), written.grad(one, mine)) < 1e-12


@pytest.mark.usefixtures("known")
def test_its_squares_are_those_of_one_gradient_per_example() -> None:
    module = network()
    params, jobs = dict(module.named_parameters()), batch(module)[1]
    params = {name: leaf.detach() for name, leaf in params.items()}
    mine, handle = Batch(*(part[0] for part in jobs)), Handle(module, cross_entropy)
    assert separable(handle, params, mine) == list(params), "in one backward pass"
    expected = {name: 4 * leaf for name, leaf in fisher_diagonal(module, mine.x, mine.y).items()}
    assert close(handle.sum_sq_grad(params, mine), expected) < 1e-12
    many = torch.func.vmap(handle.sum_sq_grad, (None, 0))(params, jobs)
    assert close({name: leaf[0] for name, leaf in many.items()}, expected) < 1e-12


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.usefixtures("known")
def test_a_network_with_it_trains_on_the_fast_engine(chunk: int | None) -> None:
    algorithm, federation = fedge.FedAvg(network(), epochs=2, batch_size=4), ragged(toy_data())
    link = Simulator(algorithm, federation, chunk=chunk)
    assert link.slower is None
    settings = {"rounds": 3, "cohort": 4, "seed": 1}
    found = fedge.train(algorithm, federation, link=link, **settings)
    reference = fedge.train(algorithm, federation, link=Loopback(algorithm, federation), **settings)
    assert close(found.params, reference.params) < 1e-10


def test_every_kind_of_the_table_is_in_a_chain_that_is_tested() -> None:
    seen = {type(layer) for build, _ in CHAINS.values() for layer in read(build())}
    assert seen == set(layers.KINDS)
