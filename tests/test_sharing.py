"""Data sharing as Zhao et al. (2018) define it: a balanced set G, a portion of it per client, a warm-up model."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import fedge
from fedge import keys
from fedge.core import At, Share
from fedge.engine import Loopback, Simulator
from fedge.handle import parameters
from tests.cases import close, ragged, toy_data, toy_model


def zhao(inner: fedge.FedAvg, **options) -> fedge.DataSharing:
    given = {"beta": 0.2, "of": "all", "balanced": True, "portion": 0.5, "warm_up": 3} | options
    return fedge.DataSharing(inner, **given)


def test_the_shared_set_is_balanced_and_every_client_has_its_own_portion() -> None:
    federation = ragged(toy_data())
    link = Simulator(fedge.FedAvg(toy_model()), federation)
    examples = link.share(At(1, 0, 0), Share(0.2, "all", balanced=True, portion=0.5))
    population = link.population
    assert len(population.shared) == len(population.shared.unique()) == round(0.2 * 90) == 18
    assert examples.y.bincount().tolist() == [6, 6, 6]
    assert torch.equal(examples.x, population.x[population.shared])
    portions = [population.shared_with(client) for client in range(7)]
    for client, mine in enumerate(portions):
        assert len(mine) == 9
        assert set(mine.tolist()) < set(population.shared.tolist())
        assert torch.equal(population.examples(client), torch.cat([federation.examples(client), mine]))
    assert len({tuple(mine.tolist()) for mine in portions}) > 1
    everybody = torch.arange(7)
    assert torch.equal(
        population.flat_examples(everybody, torch.device("cpu")),
        torch.cat([population.examples(client) for client in range(7)]),
    )
    assert population.sizes(everybody).tolist() == [len(population.examples(client)) for client in range(7)]
    link.share(At(1, 0, 0), Share(20 / 90, "all", balanced=True))
    assert sorted(population.y[population.shared].bincount().tolist()) == [6, 7, 7]


def warmed(module: nn.Module, x: torch.Tensor, y: torch.Tensor, key: int, epochs: int, lr: float) -> nn.Module:
    """Plain SGD over G in batches of 15."""
    module = copy.deepcopy(module)
    rule = torch.optim.SGD(module.parameters(), lr=lr)
    for epoch in range(epochs):
        drawn = [keys.fold(keys.fold(key, epoch), place) for place in range(len(y))]
        order = sorted(range(len(y)), key=lambda place: drawn[place])
        for start in range(0, len(y), 15):
            rows = order[start : start + 15]
            rule.zero_grad()
            nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
            rule.step()
    return module


@pytest.mark.parametrize("kind", [Simulator, Loopback])
def test_it_equals_a_plain_warm_up_and_clients_that_hold_their_portions(kind) -> None:
    data = toy_data()
    federation = ragged(data)
    inner = fedge.FedAvg(toy_model(), lr=0.2, epochs=2, batch_size=4)
    algorithm = zhao(inner)
    link = kind(algorithm, federation)
    run = fedge.train(algorithm, federation, rounds=3, cohort=4, seed=1, link=link)
    population = link.population
    shared = population.examples_shared()
    model = warmed(inner.model, shared.x, shared.y, shared.key, 3, 0.2)
    portions = [population.shared_with(client) for client in range(7)]
    copies = torch.cat(portions)  # every client's portion as examples of its own
    more = dataclasses.replace(
        data,
        train_x=torch.cat([data.train_x, data.train_x[copies]]),
        train_y=torch.cat([data.train_y, data.train_y[copies]]),
    )
    lists = [torch.cat([federation.examples(k), 90 + 9 * k + torch.arange(9)]).numpy() for k in range(7)]
    plain = fedge.train(
        dataclasses.replace(inner, model=model), fedge.Federation(more, lists), rounds=3, cohort=4, seed=1
    )
    assert close(run.params, plain.params) < 1e-12
    assert close(parameters(model), parameters(inner.model)) > 0.01


def test_the_shared_portions_are_counted_once(tmp_path) -> None:
    federation = ragged(toy_data())
    run = fedge.train(zhao(fedge.FedAvg(toy_model())), federation, rounds=2, cohort=4)
    (row,) = [row for row in run.ledger if row.task == "share"]
    one = toy_data().train_x[0].numel() * 8 + 8  # float64 and an int64 label
    assert (row.round, row.clients, row.down, row.broadcast, row.up) == (0, 7, 7 * 9 * one, 18 * one, 0)


def test_a_run_that_goes_on_ends_like_one_that_never_stopped(tmp_path) -> None:
    federation = ragged(toy_data())
    algorithm = zhao(fedge.FedAvg(toy_model(), lr=0.2, epochs=1, batch_size=4))
    whole = fedge.train(algorithm, federation, rounds=4, cohort=3, seed=2)
    fedge.train(algorithm, federation, rounds=2, cohort=3, seed=2, out=tmp_path / "run")
    gone_on = fedge.train(algorithm, federation, rounds=4, cohort=3, seed=2, out=tmp_path / "run", resume=True)
    assert close(whole.params, gone_on.params) == 0
    assert whole.ledger.rows == gone_on.ledger.rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"portion": 0.0}, "portion is 0.0, it must be greater than 0 and at most 1"),
        ({"of": "al"}, "of is 'al'"),
        ({"warm_up": -1}, "warm_up is -1, it must be a whole number of at least 0"),
        ({"warm_up": 2**31}, "warm_up is 2147483648, it must be at most 2147483647"),
        ({"warm_up": 1.5}, "warm_up is 1.5, it must be a whole number of at least 0"),
        ({"warm_up_lr": 0.0}, "warm_up_lr is 0.0, it must be greater than 0"),
    ],
)
def test_what_cannot_be_shared_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zhao(fedge.FedAvg(toy_model()), **options)


def test_a_warm_up_needs_one_model_and_a_step_size() -> None:
    with pytest.raises(ValueError, match="warm_up is 3, but FedOVA has one model per class: set it to 0"):
        zhao(fedge.FedOVA(fedge.FedAvg(toy_model(outputs=2)), classes=3))
    with pytest.raises(ValueError, match="GIANT has no local steps: say with which warm_up_lr to warm up"):
        zhao(fedge.GIANT(toy_model()))
    zhao(fedge.GIANT(toy_model()), warm_up_lr=0.1)


def test_targets_without_classes_cannot_be_balanced() -> None:
    data = fedge.data.Data(torch.randn(8, 3), torch.randn(8), torch.randn(2, 3), torch.randn(2), 0)
    federation = fedge.Federation(data, [[0, 1, 2, 3], [4, 5, 6, 7]])
    algorithm = zhao(fedge.FedAvg(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))))
    with pytest.raises(ValueError, match="balanced is true, but examples have no single label to balance"):
        fedge.train(algorithm, federation, rounds=1)
