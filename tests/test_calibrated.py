"""The layer on FedOVA's scores: against a dense least-squares solve on the examples themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedge
from fedge.algorithms.calibrated import matrix_of, solved
from fedge.engine import Loopback
from fedge.engine.links import wire
from tests.against import clients_of, cohorts_of
from tests.cases import ragged, toy_data, toy_model

ROUNDS, COHORT, RIDGE = 4, 3, 0.05


def inner() -> fedge.FedOVA:
    return fedge.FedOVA(fedge.FedAvg(toy_model(outputs=2), lr=0.2, epochs=2, batch_size=4), classes=3)


def phi(scores: Tensor) -> Tensor:
    return torch.cat([torch.tanh(scores / 4), torch.ones(len(scores), 1, dtype=scores.dtype)], 1)


@pytest.mark.parametrize("cohorts", [1, 2])
def test_the_layer_is_the_ridge_regression_on_the_cohorts_examples(cohorts: int) -> None:
    federation = ragged(toy_data())
    algorithm = fedge.Calibrated(inner(), every=2, cohorts=cohorts, ridge=RIDGE)
    run = fedge.train(algorithm, federation, rounds=ROUNDS, cohort=COHORT, seed=5)
    plain = fedge.train(inner(), federation, rounds=ROUNDS, cohort=COHORT, seed=5)
    for name, leaf in plain.params.items():
        assert torch.equal(run.params[name], leaf), "training is untouched"
    fresh = (True,) * (1 + cohorts)  # the phase of training, then the ones of calibration
    asked = cohorts_of(federation, ROUNDS, COHORT, 5, fresh)[-1][1:]
    clients, second, first = clients_of(federation), 0, 0
    for cohort in asked:
        x, y = (torch.cat([clients[k][part] for k in cohort]) for part in (0, 1))
        features = phi(plain.scores(x))
        wanted = torch.eye(3, dtype=torch.float64)[y]
        second = second + features.T @ features / len(y) / cohorts
        first = first + features.T @ wanted / len(y) / cohorts
    layer = torch.linalg.solve(second + RIDGE * torch.eye(4, dtype=torch.float64), first)
    x = federation.data.test_x
    assert torch.allclose(run.scores(x), phi(plain.scores(x)) @ layer, atol=1e-9)
    assert torch.allclose(run.module()(x), run.scores(x), atol=1e-9), "and so does the module to take home"


def test_the_layer_is_never_divided_by_less_than_the_ridge() -> None:
    """Of a mean that is no mean of squares, as after a rule that takes every number by itself."""
    draw = torch.Generator().manual_seed(0)
    moments = {"second": torch.rand(15, generator=draw).double(), "first": torch.rand(5, 4, generator=draw).double()}
    least = float(torch.linalg.eigvalsh(matrix_of(moments))[0])
    assert least < 0
    layer = solved(moments, -least)
    assert bool(torch.isfinite(layer).all())
    assert float(layer.norm()) <= float(moments["first"].norm()) / -least


class Crooked(Loopback):
    """Client 3 sends the opposite of what the layer would be in place of its means of features and labels."""

    def client(self, client, at, ask, request):
        answer = wire.decode(super().client(client, at, ask, request))
        for upload, _ in answer[0] if client == 3 and "moments" in answer[0][0][0] else ():
            layer = solved(upload["moments"], 0.01)
            upload["moments"]["first"] = -layer / layer.abs().max()
        return wire.encode(answer)


@pytest.mark.parametrize("rule", [fedge.Mean(), fedge.BoundedMean()])
def test_one_liar_does_not_turn_the_layer_round(rule) -> None:
    """Every number of it was from -1 to 1: nothing was left of 81 % accuracy, and 13 % with the rule."""
    data = fedge.data.load("digits")
    federation = fedge.Federation(data, fedge.partition.iid(data.train_y, clients=10, seed=0))
    inner = fedge.FedAvg(fedge.models.mlp(64, (32,), 10, seed=0), lr=0.1, epochs=1)
    algorithm = fedge.Robust(fedge.Calibrated(inner, every=10), rule)
    honest = fedge.train(algorithm, federation, rounds=10, seed=1).history[-1]
    lied = fedge.train(algorithm, federation, rounds=10, seed=1, link=Crooked(algorithm, federation)).history[-1]
    assert [drop["client"] for drop in lied["dropped"]] == [3]
    assert "a mean of squares has none below 0" in lied["dropped"][0]["reason"]
    assert lied["test_accuracy"] > honest["test_accuracy"] - 0.02


def test_between_its_rounds_the_scores_are_the_inner_ones() -> None:
    federation = ragged(toy_data())
    run = fedge.train(fedge.Calibrated(inner(), every=2), federation, rounds=3, cohort=COHORT)
    plain = fedge.train(inner(), federation, rounds=3, cohort=COHORT)
    x = federation.data.test_x
    assert torch.equal(run.scores(x), plain.scores(x))
    assert torch.equal(run.module()(x), plain.module()(x))


def test_an_earlier_run_without_it_can_be_continued() -> None:
    federation = ragged(toy_data())
    before = fedge.train(inner(), federation, rounds=2, cohort=COHORT)
    run = fedge.train(fedge.Calibrated(inner(), every=1), federation, rounds=1, cohort=COHORT, start=before)
    assert run.rounds == 3
    assert not torch.equal(run.scores(federation.data.test_x), before.scores(federation.data.test_x))


def test_models_that_were_trained_apart_become_comparable() -> None:
    """One class shouts: its scores are shifted by a constant, which least squares takes back."""
    data = toy_data(600)
    federation = fedge.Federation(data, [torch.arange(600).numpy()])
    run = fedge.train(inner(), federation, rounds=1)
    params = {name: leaf.clone() for name, leaf in run.params.items()}
    params["fc2.bias"][0, 1] += 20.0
    shouting = fedge.Run(run.algorithm, run.algorithm.with_params(run.state, params), run.handle)
    assert (shouting.predict(data.test_x) == data.test_y).double().mean() < 0.7
    frozen = fedge.FedOVA(fedge.FedAvg(toy_model(outputs=2), lr=1e-12, epochs=1, batch_size=None), classes=3)
    again = fedge.train(fedge.Calibrated(frozen, every=1), federation, rounds=1, start=shouting)
    accuracy = (again.predict(data.test_x) == data.test_y).double().mean()
    assert accuracy >= (run.predict(data.test_x) == data.test_y).double().mean() - 0.05


class Bare(nn.Module):
    """No biases; the head is registered last, or first."""

    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        layers = {"trunk": nn.Linear(6, 5, bias=False), "head": nn.Linear(5, 3, bias=False)}
        for name in sorted(layers, reverse=not turned):
            self.add_module(name, layers[name])
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name in ("trunk", "head"):
                layers[name].weight.copy_(torch.randn(layers[name].weight.shape, generator=draw))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.trunk(x)))


def test_a_head_without_bias_and_one_that_is_not_registered_last() -> None:
    federation, x = ragged(toy_data()), toy_data().test_x

    def trained(model: nn.Module, **more) -> Tensor:
        algorithm = fedge.Calibrated(fedge.FedAvg(model, epochs=1), every=1, **more)
        return fedge.train(algorithm, federation, rounds=2, cohort=COHORT).scores(x)

    found = trained(Bare())
    assert found.shape == (len(x), 3)
    with pytest.raises(ValueError, match="the last layer that the model registers has 5, but the model gives 3 scores"):
        trained(Bare(turned=True))
    assert torch.allclose(trained(Bare(turned=True), classes=3), found, atol=1e-12)
    with pytest.raises(ValueError, match="classes is 4, but the model gives 3 scores: set classes=3"):
        trained(Bare(), classes=4)


def test_what_it_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="every is 0, it must be a whole number of at least 1"):
        fedge.Calibrated(inner(), every=0)
    with pytest.raises(ValueError, match="scores are calibrated once"):
        fedge.Calibrated(fedge.Calibrated(inner()))
    with pytest.raises(ValueError, match="has no noise"):
        fedge.Calibrated(fedge.Private(fedge.FedAvg(toy_model()), clients=7, expected=3))
