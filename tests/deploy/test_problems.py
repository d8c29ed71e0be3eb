"""A regression, tokens and examples of several inputs over real Flower messages: as over the loop-back link."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedge
from fedge import inputs
from fedge.deploy import FlowerLink, Roster, client_app
from fedge.engine import Loopback
from tests.cases import close
from tests.test_inputs import Both, both
from tests.test_problems import LISTS, linear, numbers, sequences

from .test_link import Yard


def problem(kind: str) -> tuple[Any, fedge.data.Data]:
    if kind == "numbers":
        return fedge.FedAvg(linear(5, 2), lr=0.1, epochs=2, batch_size=4), numbers(2)
    if kind == "tokens":
        data, model = sequences(second=True)
        return fedge.SCAFFOLD(model, lr=0.1, epochs=1, batch_size=4), data
    algorithm = fedge.FedAvg(Both(), lr=0.1, epochs=1, batch_size=4)
    return fedge.DataSharing(algorithm, beta=0.3), both(named=kind == "named", regression=True)


@pytest.mark.parametrize("kind", ["numbers", "tokens", "named", "in order"])
def test_a_fleet_learns_any_problem(kind: str) -> None:
    algorithm, data = problem(kind)
    federation = fedge.Federation(data, LISTS)

    def load(client: int) -> tuple[Any, torch.Tensor]:
        mine = federation.examples(client)
        return inputs.take(data.train_x, mine), data.train_y[mine]

    yard = Yard(client_app(algorithm, load), range(3))
    roster = Roster(yard, 3, [""], lambda line: None)
    roster.wait(3, 0, 5)
    link = FlowerLink(algorithm, federation, yard, roster, deadline=60.0)
    over = fedge.train(algorithm, federation, rounds=2, link=link)
    back = fedge.train(algorithm, federation, rounds=2, link=Loopback(algorithm, federation))
    assert close(over.params, back.params) == 0
    assert over.history[-1]["test_loss"] == back.history[-1]["test_loss"]
    assert [record["dropped"] for record in over.history] == [[], []]
