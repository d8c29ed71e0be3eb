"""The links agree, for every algorithm, and nothing but the addresses decides what happens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import fedge
from fedge.algorithms import ALGORITHMS
from fedge.core import Batch, Codec, Combine
from fedge.engine import ClientError, Loopback, Simulator
from fedge.engine.recording.recorder import WARM
from tests.cases import EACH_ONCE, EACH_PATH, algorithms, cases, close, ragged, toy_data, toy_model


def simulate(algorithm, federation, chunk=None, rounds=3, **options):
    link = Simulator(algorithm, federation, chunk=chunk)
    return fedge.train(algorithm, federation, rounds=rounds, cohort=5, seed=3, link=link, **options)


@pytest.mark.parametrize("name", cases(EACH_ONCE))
def test_simulator_and_loopback_agree(name: str) -> None:
    algorithm, federation = algorithms()[name], ragged(toy_data())
    fast = simulate(algorithm, federation)
    slow = fedge.train(algorithm, federation, rounds=3, cohort=5, seed=3, link=Loopback(algorithm, federation))
    assert close(fast.params, slow.params) < 1e-10
    assert fast.ledger.rows == slow.ledger.rows
    assert [r.get("cohort") for r in fast.history] == [r.get("cohort") for r in slow.history]


def test_classes_that_were_asked_before_and_others_travel_in_one_phase() -> None:
    """A class that nobody held in round 1 has no last step in round 2: uploads of two shapes."""
    algorithm, federation = algorithms()["fedova_subspace"], ragged(toy_data())
    options = {"rounds": 3, "cohort": 2, "seed": 5}
    fast = fedge.train(algorithm, federation, link=Simulator(algorithm, federation), **options)
    slow = fedge.train(algorithm, federation, link=Loopback(algorithm, federation), **options)
    steps = [len(one["steps"]) for one in fedge.train(algorithm, federation, **options | {"rounds": 1}).state]
    assert sorted(set(steps)) == [0, 1]
    assert [record["dropped"] for record in slow.history] == [[], [], []]
    assert close(fast.params, slow.params) < 1e-10
    assert fast.ledger.rows == slow.ledger.rows


@pytest.mark.parametrize("name", cases(EACH_PATH))
@pytest.mark.parametrize("chunk", [1, 3])
def test_chunk_changes_nothing_beyond_rounding(name: str, chunk: int) -> None:
    algorithm, federation = algorithms()[name], ragged(toy_data())
    whole, parts = simulate(algorithm, federation), simulate(algorithm, federation, chunk)
    assert close(whole.params, parts.params) < 1e-10
    assert whole.ledger.rows == parts.ledger.rows


@pytest.mark.parametrize("name", cases(EACH_PATH))
def test_runs_are_deterministic_to_the_bit_and_the_seed_matters(name: str) -> None:
    algorithm, federation = algorithms()[name], ragged(toy_data())
    first, second = simulate(algorithm, federation), simulate(algorithm, federation)
    assert close(first.params, second.params) == 0
    other = fedge.train(algorithm, federation, rounds=3, cohort=5, seed=4)
    assert close(first.params, other.params) > 1e-6


@pytest.mark.parametrize("name", cases(EACH_PATH))
def test_going_on_from_a_run_equals_one_run(name: str) -> None:
    algorithm, federation = algorithms()[name], ragged(toy_data())
    whole = fedge.train(algorithm, federation, rounds=4, cohort=5, seed=3)
    half = fedge.train(algorithm, federation, rounds=2, cohort=5, seed=3)
    rest = fedge.train(algorithm, federation, rounds=2, cohort=5, seed=3, start=half)
    assert close(whole.params, rest.params) == 0
    assert whole.ledger.rows == rest.ledger.rows
    assert [r["round"] for r in rest.history] == [1, 2, 3, 4]
    assert half.rounds == 2  # the earlier run is left as it was


def unshared(names: Iterable[str]) -> list[str]:
    """Sharing draws from the pool by its numbers."""
    return [name for name in sorted(names) if "sharing" not in name]


@pytest.mark.parametrize("name", cases(unshared(EACH_PATH), unshared(algorithms())))
def test_the_order_of_a_clients_examples_in_memory_is_all_that_a_list_decides(name: str) -> None:
    """Another numbering of the pool with the same clients gives the same model: addresses are positions, not ids."""
    algorithm, data = algorithms()[name], toy_data()
    federation = ragged(data)
    lists = [federation.examples(k) for k in range(federation.clients)]
    shuffled = torch.randperm(len(data.train_y), generator=torch.Generator().manual_seed(5))
    where = torch.argsort(shuffled)
    moved = fedge.data.Data(data.train_x[shuffled], data.train_y[shuffled], data.test_x, data.test_y, 3)
    other = fedge.Federation(moved, [where[chosen].numpy() for chosen in lists])
    assert close(simulate(algorithm, federation).params, simulate(algorithm, other).params) < 1e-12


@pytest.mark.parametrize("name", cases(EACH_PATH))
def test_padding_is_inert(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, federation = algorithms()[name], ragged(toy_data())
    clean = simulate(algorithm, federation)
    gather, padded = Simulator.gather, 0

    def poisoned(self, indices, mask, keys) -> Batch:
        nonlocal padded
        batch = gather(self, indices, mask, keys)
        noise = 1e6 * torch.randn(batch.x.shape, generator=torch.Generator().manual_seed(1), dtype=batch.x.dtype)
        padded += int((~mask).sum())
        return batch._replace(
            x=torch.where(mask.unsqueeze(-1), batch.x, noise), y=torch.where(mask, batch.y, (batch.y + 1) % 3)
        )

    monkeypatch.setattr(Simulator, "gather", poisoned)
    dirty = simulate(algorithm, federation)
    assert padded > 0
    assert close(clean.params, dirty.params) == 0


def parts(value: Any) -> set[type]:
    """The types of an object and of all that its fields hold."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return {type(value)}.union(*(parts(getattr(value, field.name)) for field in fields))


def test_the_short_form_has_every_algorithm_rule_and_codec() -> None:
    known = algorithms()
    public = {value for value in vars(fedge).values() if isinstance(value, type) and dataclasses.is_dataclass(value)}
    wanted = {value for value in public if issubclass(value, Combine | Codec)} | set(ALGORITHMS.values())
    assert wanted - {fedge.Mean} <= set().union(*(parts(known[name]) for name in EACH_ONCE))  # the mean: if no other


def test_recording_a_step_changes_no_bit() -> None:
    """Equal clients, so that one shape is seen often enough to be recorded, with and without the recording."""
    data = toy_data()
    federation = fedge.Federation(data, fedge.partition.iid(data.train_y, 9, seed=0))
    algorithm = fedge.FedAvg(toy_model(), lr=0.1, epochs=5, batch_size=2, momentum=0.5)
    link = Simulator(algorithm, federation)
    recorded = fedge.train(algorithm, federation, rounds=4, seed=0, link=link)
    steps = [fold.step for fold in link._folds.values()]
    assert any(step.recorded for step in steps), f"no shape was seen more than {WARM['cpu']} times"
    plain = None
    for _ in range(4):  # a fresh link every round never gets warm
        plain = fedge.train(algorithm, federation, rounds=1, seed=0, start=plain)
    assert close(recorded.params, plain.params) == 0


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = toy_model()
        self.drop, self.channels = nn.Dropout(0.4), nn.Dropout1d(0.3)

    def forward(self, x):
        x = self.channels(x.unsqueeze(2)).squeeze(2)
        return self.inner(self.drop(x))


def test_dropout_is_the_same_under_any_chunk_and_link() -> None:
    federation = ragged(toy_data())
    algorithm = fedge.FedAvg(Dropping(), lr=0.2, epochs=2, batch_size=4)
    runs = [simulate(algorithm, federation, chunk) for chunk in (None, 1, 3)]
    runs.append(fedge.train(algorithm, federation, rounds=3, cohort=5, seed=3, link=Loopback(algorithm, federation)))
    for run in runs[1:]:
        assert close(runs[0].params, run.params) < 1e-10
    without = Dropping()
    without.drop.p = without.channels.p = 0.0
    assert (
        close(runs[0].params, simulate(fedge.FedAvg(without, lr=0.2, epochs=2, batch_size=4), federation).params) > 1e-3
    )


def test_dropout_is_off_when_predicting() -> None:
    federation = ragged(toy_data())
    run = simulate(fedge.FedAvg(Dropping(), lr=0.2, epochs=2, batch_size=4), federation)
    x = federation.data.test_x
    assert torch.equal(run.scores(x), run.scores(x))


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = toy_model()

    def forward(self, x):
        return self.inner(x + 0.1 * torch.randn_like(x))


@pytest.mark.parametrize("chunk", [None, 1])
def test_other_random_operations_are_errors_by_name(chunk: int | None) -> None:
    federation = ragged(toy_data())
    with pytest.raises(RuntimeError, match=r"randn_like.*nn\.Dropout"):
        simulate(fedge.FedAvg(Noisy()), federation, chunk)


class Sneaky(nn.Module):
    """Draws where no mode can see it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = toy_model()

    def forward(self, x):
        keep = torch.ops.aten.bernoulli.p(torch.empty(x.shape), 0.5)
        return self.inner(x * keep)


@pytest.mark.parametrize("link", [lambda a, f: Simulator(a, f, chunk=1), Loopback])
def test_a_hidden_draw_from_the_global_generator_is_an_error(link) -> None:
    algorithm, federation = fedge.FedAvg(Sneaky()), ragged(toy_data())
    with pytest.raises(RuntimeError, match="drew from torch's global generator"):
        fedge.train(algorithm, federation, rounds=1, link=link(algorithm, federation))


def test_loopback_errors_name_the_task_the_client_and_the_step() -> None:
    federation = ragged(toy_data())
    calls = 0

    def loss(logits, y):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise ZeroDivisionError("a bug of mine")
        return fedge.cross_entropy(logits, y)

    algorithm = fedge.FedAvg(toy_model(), epochs=3, batch_size=None, loss=loss)
    with pytest.raises(ClientError, match=r"task 'train', client 0, step 2: ZeroDivisionError: a bug of mine"):
        fedge.train(algorithm, federation, rounds=1, seed=0, link=Loopback(algorithm, federation))
