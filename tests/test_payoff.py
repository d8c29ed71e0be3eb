"""Steps are recorded where that repays itself in the rest of the run."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import fedge
from fedge.engine import Simulator
from fedge.engine.recording.payoff import PER_OPERATION, SAVES, Operations, Payoff, Step
from fedge.engine.recording.recorder import Traced, at_once
from fedge.engine.ways import Way
from fedge.handle.swapped import Swapped
from tests.cases import ragged, toy_data, toy_model


def test_what_is_saved_in_the_rest_of_the_run_is_weighed_against_a_recording() -> None:
    ahead, step = [10.0], Step("rare")
    payoff = Payoff(lambda: ahead[0])
    payoff.took(step, 0.1)
    assert not payoff.pays(step, 8), "nobody has counted its operations"
    assert payoff._wants_operations(step, 1)
    assert not payoff._wants_operations(step, 2), "it is too rare so far"
    payoff.took(step, 0.1, operations=100)
    assert not payoff._wants_operations(step, 1)
    assert payoff.pays(step, 8) == (SAVES * 10 * 0.2 >= 100 * PER_OPERATION)
    for seconds, pays in ((SAVES * 2 - 0.01, True), (SAVES * 2 + 0.02, False)):
        payoff._recordings.clear()
        payoff.recorded(step, seconds)  # now it is known what a recording takes
        assert payoff.pays(step, 8) == pays
    ahead[0] = math.inf
    assert payoff.pays(Step("never seen"), 8)
    assert not payoff._wants_operations(Step("never seen"), 0)


def test_two_recordings_serve_all_heights_unless_operations_follow_the_height() -> None:
    payoff = Payoff(lambda: 10.0)
    high, low, one = (Step(f"height {height}", "family", height) for height in (9, 8, 1))
    payoff.recorded(high, 1.0)  # unknown operations teach nothing
    for step, operations in ((high, 1000), (one, 990)):
        payoff.took(step, 0.1, operations)
    needed = 1000 * PER_OPERATION / (10 * SAVES)
    payoff.took(high, needed - 0.2 + 1e-6)
    assert payoff.pays(high, 8), "of one height so far one recording is enough"
    payoff.took(low, 1e-6, 1000)
    assert payoff.calls(low) == payoff.calls(high) == 4, "steps of a family count together"
    assert not payoff.pays(low, 8), "two heights, two recordings"
    payoff.took(high, needed)
    assert payoff.pays(low, 8)
    payoff.took(low, 1e-6, 900)
    assert payoff.calls(low) == 2, "there are operations for every client: each height stands for itself"
    assert payoff.pays(high, 8)
    assert not payoff.pays(low, 8)


def test_operations_are_counted_below_what_stacks_them() -> None:
    with Operations() as counted:
        torch.func.vmap(lambda x: x.sin().cos())(torch.ones(3))
    few = counted.count
    with Operations() as counted:
        torch.func.vmap(lambda x: x.sin().cos().sin())(torch.ones(30))
    assert counted.count == few + 1


class Counted:
    """Rounds in which a step was recorded, by height of the stack or size of the batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[int] = []
        record = Traced._record

        def watched(traced: Traced, args: Any, compile: bool) -> Any:
            self.made.append(len(args[2].mask))
            return record(traced, args, compile)

        monkeypatch.setattr(Traced, "_record", watched)


def final(way: Way, rounds: int, epochs: int = 1) -> dict[str, torch.Tensor]:
    algorithm = fedge.FedAvg(toy_model(), lr=0.1, epochs=epochs, batch_size=4)
    run = fedge.train(algorithm, ragged(toy_data()), rounds=rounds, cohort=5, seed=1, engine=fedge.Engine(way=way))
    return run.params


@pytest.mark.short_runs
@pytest.mark.parametrize("way", ["single", "stacked"])
def test_a_short_run_records_nothing_and_a_long_one_does(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    short = final(way, 2)
    assert not counted.made
    final(way, 400)
    assert counted.made
    counted.made.clear()
    with at_once():
        recorded = final(way, 2)
    assert counted.made
    assert all(torch.equal(short[name], recorded[name]) for name in short), "when it is recorded changes no bit"


def test_shapes_of_a_recording_are_noted_in_one_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode for every tensor is half of what a recording costs."""
    graphs, graph = [], Traced._graph
    monkeypatch.setattr(Traced, "_graph", lambda *given: graphs.append(graph(*given)) or graphs[-1])
    with at_once():
        final("single", 1)
    assert graphs
    for one in graphs:
        values = [node.meta["val"] for node in one.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
        assert len({id(value.fake_mode) for value in values}) == 1


@pytest.mark.short_runs
@pytest.mark.parametrize(("rounds", "workers", "ahead"), [(8, 1, 3.0), (8, 2, 7.5), (2, 1, 0.0), (None, 1, math.inf)])
def test_the_rest_of_a_run_against_what_went_before(rounds: int | None, workers: int, ahead: float) -> None:
    """What is saved counts for the steps of all five clients: of two workers side by side one may record."""
    algorithm, federation = fedge.FedAvg(toy_model(), lr=0.1), ragged(toy_data())
    link = Simulator(algorithm, federation, way="single", workers=workers, rounds=rounds)
    fedge.train(algorithm, federation, rounds=2, cohort=5, link=link)
    assert link._ahead() == ahead


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(9, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 9)
        self.out.weight = self.embed.weight
        self.again = self.mix

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        found: torch.Tensor = self.out(self.again(self.embed(x))[0][:, -1]) * scale
        return found


def parametrised() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize(("make", "x"), [(Tied, torch.tensor([[1, 2], [3, 4]])), (parametrised, torch.ones(5, 3))])
def test_a_module_is_called_with_other_parameters_and_left_as_it_was(make: Any, x: torch.Tensor) -> None:
    module = make()
    other = copy.deepcopy(module)  # torch's own way leaves a layer that has two names with the other parameters
    swapped = Swapped(module)
    before = {name: leaf.clone() for name, leaf in module.named_parameters()}
    given = {name: torch.randn_like(leaf) for name, leaf in before.items()}
    for some in (given, dict(list(given.items())[:1])):
        assert torch.equal(swapped(some, (x,), {}), functional_call(copy.deepcopy(other), some, (x,)))
    with pytest.raises((RuntimeError, ValueError)):
        swapped(given, (x.new_zeros(2, 7, 9),), {})
    found = dict(module.named_parameters())
    assert list(found) == list(before)
    assert all(isinstance(leaf, nn.Parameter) for leaf in found.values())
    assert all(torch.equal(found[name], leaf) for name, leaf in before.items())
    if make is Tied:
        assert module.out.weight is module.embed.weight
        twice = {"scale": 2.0}
        assert torch.equal(swapped(given, (x,), twice), functional_call(other, given, (x,), twice))
