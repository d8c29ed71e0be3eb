"""Every word of an address matters: one test a row of the table in docs/randomness.md."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedge
from fedge.core import At, Task
from fedge.engine.clients.batches import client_key, client_keys, one_client
from fedge.handle import Handle, cross_entropy, parameters
from fedge.loop import cohorts

TASK = Task(None, None, None, epochs=2, batch_size=4)  # type: ignore[arg-type]
HERE = At(seed=1, round=2, phase=3)


def order(at: At = HERE, client: int = 7, task: Task = TASK, n: int = 30) -> Tensor:
    positions = torch.arange(n)
    return torch.cat([batch.x for batch in one_client(task, positions, positions, client_key(at, client))])


def test_an_epoch_is_a_permutation_and_no_two_are_alike() -> None:
    first, second = order()[:30], order()[30:]
    for epoch in (first, second):
        assert torch.equal(epoch.sort().values, torch.arange(30))
        assert not torch.equal(epoch, torch.arange(30))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("other", [HERE._replace(seed=9), HERE._replace(round=9), HERE._replace(phase=9)])
def test_batches_depend_on_seed_round_and_phase(other: At) -> None:
    assert not torch.equal(order(), order(other))


def test_batches_depend_on_the_client_and_on_nothing_else() -> None:
    assert not torch.equal(order(), order(client=8))
    assert torch.equal(order(), order())
    keys = client_keys(HERE, torch.tensor([7, 8]))
    assert keys.tolist() == [client_key(HERE, 7), client_key(HERE, 8)]


def test_first_positions_are_uniform() -> None:
    """Over many clients every example comes first about equally often."""
    firsts = torch.stack([order(client=k, n=10)[0] for k in range(2000)])
    assert (firsts.bincount(minlength=10) - 200).abs().max() < 70


@pytest.mark.parametrize(("batches", "expected"), [(1, 4), (3, 12), (9, 34), (100, 60)])
def test_batches_stops_after_so_many(batches: int, expected: int) -> None:
    """30 examples in batches of 4: eight to an epoch, the last of two."""
    task = Task(None, None, None, epochs=2, batch_size=4, batches=batches)  # type: ignore[arg-type]
    assert len(order(task=task)) == expected
    assert task.steps(30) == min(batches, 16)
    assert torch.equal(order(task=task), order()[:expected])


def test_cohorts_depend_on_seed_round_and_phase() -> None:
    draw = cohorts(1000, 20)
    assert torch.equal(draw(HERE), draw(HERE))
    for other in (HERE._replace(seed=9), HERE._replace(round=9), HERE._replace(phase=9)):
        assert not torch.equal(draw(HERE), draw(other))


def test_every_step_has_a_key_of_its_own() -> None:
    x = torch.zeros(30, 1)
    keys = [int(b.key) for b in one_client(TASK, x, torch.zeros(30, dtype=torch.long), client_key(HERE, 7))]
    assert len(set(keys)) == len(keys) == 16


class Twice(nn.Module):
    """Two dropouts in a row on ones: the masks can be read off the output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.first, self.second = layer, layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.first(x), self.second(x)]) * self.weight


def masks(layer: nn.Module, key: int, shape: tuple[int, ...]) -> Tensor:
    module = Twice(layer)
    return Handle(module, cross_entropy).logits(parameters(module), torch.ones(shape), torch.tensor(key))


def test_dropout_rescales_and_depends_on_the_step_and_the_call() -> None:
    first, second = masks(nn.Dropout(0.2), 5, (100, 50))
    assert set(first.unique().tolist()) == {0.0, 1.25}
    assert abs(float(first.mean()) - 1) < 0.03
    assert not torch.equal(first, second)
    assert not torch.equal(first, masks(nn.Dropout(0.2), 6, (100, 50))[0])
    assert torch.equal(first, masks(nn.Dropout(0.2), 5, (100, 50))[0])


@pytest.mark.parametrize(("layer", "shape"), [(nn.Dropout1d, (40, 30, 4)), (nn.Dropout2d, (40, 30, 4, 4))])
def test_channel_dropout_drops_whole_channels(layer: type[nn.Module], shape: tuple[int, ...]) -> None:
    out = masks(layer(0.5), 3, shape)[0].flatten(2)
    assert bool((out == out[..., :1]).all())
    assert 0.4 < float((out[..., 0] == 0).float().mean()) < 0.6


def test_shared_examples_do_not_give_a_client_new_rows() -> None:
    """Which classes a client trains follows from its own labels, whatever was shared with it."""
    data = fedge.data.load("digits")
    federation = fedge.Federation(data, fedge.partition.labels_per_client(data.train_y, 50, labels=2, seed=0))
    inner = fedge.FedOVA(fedge.FedAvg(fedge.models.mlp(64, (4,), 2, seed=0), epochs=1))
    run = fedge.train(fedge.DataSharing(inner, beta=1.0), federation, rounds=1, cohort=5)
    (train,) = [row for row in run.ledger if row.task == "train"]
    d = 64 * 4 + 4 + 4 * 2 + 2
    assert train.down == 5 * 2 * d * 4


def test_a_dropped_client_is_not_asked_again_in_the_same_round() -> None:
    """Neither in a later phase nor when it is drawn into a new cohort."""
    from fedge.core import Algorithm, Ask, Drop, Reply, drive

    asked: list[list[int]] = []

    class Faulty:
        def ask(self, at, asks, clients):
            asked.append(clients.tolist())
            return [Reply({}, torch.tensor(1))], [Drop(2, "work", "broken")] if len(asked) == 1 else []

    def flow():
        yield Ask("work", {})
        yield Ask("work", {})
        yield Ask("work", {}, cohort="new")
        return "end"

    end, progress = drive(flow(), Faulty(), 0, 1, lambda at: torch.tensor([1, 2, 3]))
    assert (end, asked) == ("end", [[1, 2, 3], [1, 3], [1, 3]])
    assert issubclass(fedge.FedAvg, Algorithm)
    assert [drop.client for drop in progress.dropped] == [2]
