"""FedAvg against a plain nn.Module and torch.optim loop, in float64 over three rounds of ragged clients."""

from __future__ import annotations

import pytest

import fedge
from tests.against import clients_of, cohorts_of, order_of
from tests.cases import close, ragged, toy_data, toy_model
from tests.reference.fedavg import fedavg

VARIANTS = {
    "plain": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.02},
    "full_batch": {"batch_size": None},
    "adam": {"optimiser": "adam", "lr": 0.01, "weight_decay": 0.02},
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


def test_it_learns_digits_that_are_dealt_two_labels_a_client() -> None:
    data = fedge.data.load("digits")
    lists = fedge.partition.labels_per_client(data.train_y, clients=100, labels=2, seed=0)
    algorithm = fedge.FedAvg(fedge.models.mlp(seed=0), lr=0.2, batch_size=10)
    run = fedge.train(algorithm, fedge.Federation(data, lists), rounds=50, cohort=20, seed=0)
    accuracies = [record["test_accuracy"] for record in run.history]
    assert sum(accuracies[-5:]) / 5 >= 0.85
