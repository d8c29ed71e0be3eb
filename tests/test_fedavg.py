"""FedAvg against a plain nn.Module and torch.optim loop, in float64 over three rounds of ragged clients."""

from __future__ import annotations

import pytest
import torch

import fedge
from fedge.algorithms.optimisers import clipped
from tests.against import clients_of, cohorts_of, order_of
from tests.cases import close, ragged, toy_data, toy_model
from tests.reference.fedavg import fedavg

VARIANTS = {
    "plain": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.02},
    "full_batch": {"batch_size": None},
    "adam": {"optimiser": "adam", "lr": 0.01, "weight_decay": 0.02},
    "clip": {"clip": 0.5, "momentum": 0.9, "weight_decay": 0.02},
    "adam_clip": {"optimiser": "adam", "lr": 0.01, "clip": 0.3},
    "server_step": {"server_lr": 0.5},
    "server_momentum": {"server_momentum": 0.6},
    "server_adam": {"server_optimiser": "adam", "server_lr": 0.03},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_against_the_plain_loop(name: str) -> None:
    options = {"lr": 0.1, "epochs": 2, "batch_size": 4, **VARIANTS[name]}
    federation = ragged(toy_data())
    run = fedge.train(fedge.FedAvg(toy_model(), **options), federation, rounds=3, cohort=5, seed=9)
    cohorts = cohorts_of(federation, 3, 5, seed=9)
    expected = fedavg(toy_model(), clients_of(federation), cohorts, order_of(federation, 9), **options)
    assert close(run.params, expected) < 1e-10
    assert [record["cohort"] for record in run.history] == [phases[0] for phases in cohorts]


def test_clipping_bites_only_what_is_longer() -> None:
    grad = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    assert clipped(None, grad) is grad
    assert close(clipped(5.1, grad), grad) == 0
    assert close(clipped(1.0, grad), {"a": torch.tensor([0.6, 0.0]), "b": torch.tensor([[0.8]])}) < 1e-6
    for wrong in (0, -1, "much", float("nan")):
        for algorithm in (fedge.FedAvg, fedge.FedDANE, fedge.FisherLBFGS):
            with pytest.raises(ValueError, match="clip is"):
                algorithm(toy_model(), clip=wrong)
    half = {"a": torch.full((3,), 400.0, dtype=torch.float16)}
    assert float(clipped(1.0, half)["a"].float().norm()) == pytest.approx(1, rel=1e-2), "no overflow of the squares"


def test_a_step_size_that_ruins_the_network_serves_when_gradients_are_clipped() -> None:
    """Two labels per client: the first steps are large, and with them units die that no later round brings back."""
    data = fedge.data.load("digits")
    lists = fedge.partition.labels_per_client(data.train_y, clients=100, labels=2, seed=0)
    found = {}
    for clip in (None, 1.0):
        algorithm = fedge.FedAvg(fedge.models.mlp(seed=0), lr=1.0, batch_size=10, clip=clip)
        run = fedge.train(algorithm, fedge.Federation(data, lists), rounds=25, cohort=20, seed=0)
        found[clip] = run.history[-1]["test_accuracy"]
    assert found[None] < 0.2
    assert found[1.0] > 0.85


def test_it_learns_digits_that_are_dealt_two_labels_a_client() -> None:
    data = fedge.data.load("digits")
    lists = fedge.partition.labels_per_client(data.train_y, clients=100, labels=2, seed=0)
    algorithm = fedge.FedAvg(fedge.models.mlp(seed=0), lr=0.2, batch_size=10)
    run = fedge.train(algorithm, fedge.Federation(data, lists), rounds=50, cohort=20, seed=0)
    accuracies = [record["test_accuracy"] for record in run.history]
    assert sum(accuracies[-5:]) / 5 >= 0.85
