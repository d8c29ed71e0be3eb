"""Recordings for stacks of any height from two of them: few are made, numbers agree, and what is wrong is given up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fedge
from fedge.data import Data
from fedge.engine import Loopback, Simulator
from fedge.engine.clients.run_task import Stacked
from fedge.engine.recording import recorder
from fedge.engine.recording.heights import Heights
from tests.cases import close
from tests.networks import CLASSES, NETWORKS, Network


def staircase(network: Network, clients: int) -> fedge.Federation:
    """Client k holds 4 (k + 1) examples: in batches of four, a client leaves the stack with every step."""
    total = 4 * clients * (clients + 1) // 2
    x, y = network.examples(total), torch.arange(total) % CLASSES
    ends = np.cumsum([4 * (k + 1) for k in range(clients)])
    return fedge.Federation(Data(x, y, x, y, CLASSES), np.split(np.arange(total), ends[:-1]))


@pytest.mark.parametrize("name", ["gru", "lstm", "transformer"])
def test_two_heights_are_recorded_and_all_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = NETWORKS[name]
    shared, own = staircase(network, 6), fedge.FedAvg(network.module(), epochs=1, batch_size=4, lr=0.2)
    expected = fedge.train(own, shared, rounds=4, link=Loopback(own, shared)).params
    monkeypatch.setitem(recorder.WARM, "cpu", 0)
    made: list[int] = []
    record = recorder.Traced._record
    monkeypatch.setattr(
        recorder.Traced,
        "_record",
        lambda self, args, compile: (made.append(len(args[3])), record(self, args, compile))[1],
    )
    link = Simulator(own, shared, way="stacked")
    found = fedge.train(own, shared, rounds=4, link=link).params
    assert close(found, expected) < 1e-10
    assert sorted(made) == [5, 6], "the others follow from these"
    (fold,) = link._folds.values()
    assert len(fold.step.recorded) == 6


def recorded(function: Any, height: int) -> Any:
    return make_fx(function)(torch.ones(height, 3))


def test_sizes_follow_the_height() -> None:
    def function(x: Tensor) -> Tensor:
        return (x.reshape(-1) * torch.arange(3 * len(x) + 2)[2:]).view(len(x), 3).sum(1)

    heights = Heights()
    assert heights.at(4) is None
    for height in (2, 5):
        heights.add(height, recorded(function, height))
    for height in (1, 3, 9):
        x = torch.rand(height, 3)
        made = heights.at(height)
        assert made is not None
        assert torch.equal(made(x), function(x))


def test_what_differs_in_more_than_sizes_has_no_line() -> None:
    cases = {
        "operations": lambda x: sum(x.unbind()),
        "numbers": lambda x: x * (1 / len(x)),
        "constants": lambda x: x * torch.tensor([float(len(x))]),
    }
    for name, function in cases.items():
        heights = Heights()
        for height in (2, 3, 4):
            heights.add(height, recorded(function, height))
        assert heights.at(5) is None, name


def test_a_recording_that_does_something_else_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are no line: every height is recorded by itself, and the numbers are right."""
    network = NETWORKS["gru"]
    shared, own = staircase(network, 5), fedge.FedAvg(network.module(), epochs=1, batch_size=4, lr=0.2)
    expected = fedge.train(own, shared, rounds=3, link=Loopback(own, shared)).params
    monkeypatch.setitem(recorder.WARM, "cpu", 0)
    at = Heights.at

    def wrong(self: Heights, height: int) -> Any:
        found = at(self, height)
        if found is not None:
            (end,) = [node for node in found.graph.nodes if node.op == "output"]
            end.args = (list(reversed(end.args[0])),)
            found.recompile()
        return found

    monkeypatch.setattr(Heights, "at", wrong)
    link = Simulator(own, shared, way="stacked")
    assert close(fedge.train(own, shared, rounds=3, link=link).params, expected) < 1e-10
    step = next(iter(link._folds.values())).step
    assert len(step.recorded) == 5
    assert step.payoff._apart == set(step._heights), "from now on every height has to repay its own recording"


def test_heights_of_a_stack_are_few_and_waste_little() -> None:
    task = fedge.FedAvg(NETWORKS["gru"].module()).tasks(None)["train"]  # type: ignore[arg-type]
    stack = Stacked(task, {"params": None})
    found = [stack._height(active, 200) for active in range(1, 201)]
    assert found[:16] == list(range(1, 17))
    assert len(set(found)) == 45
    assert all(active <= height <= active * 9 / 8 for active, height in enumerate(found, 1))
