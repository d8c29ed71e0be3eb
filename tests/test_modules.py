"""What people have: batch norm, replaced or frozen; adapters; tied and frozen weights; steps that write in place."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import fedge
from fedge.core import Batch
from fedge.engine import Loopback, Simulator
from fedge.handle import parameters
from fedge.models import lora, merged, without_batch_norm
from tests.cases import close, ragged, toy_data, toy_model
from tests.networks import NETWORKS, Normed, Tied, Transformer, federation


def test_batch_norm_becomes_group_norm_with_its_scale_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    module = Normed()
    with torch.no_grad():
        module.norm.weight += torch.arange(4)
    with caplog.at_level(logging.INFO, "fedge"):
        found = without_batch_norm(module, groups=4)
    assert [r.getMessage() for r in caplog.records] == [
        "batch norm replaced by group norm: 'norm' (4 groups), 'norms.0' (3 groups), 'norms.1' (3 groups)"
    ]
    assert isinstance(module.norm, nn.BatchNorm2d), "the given module is left alone"
    assert isinstance(found.norm, nn.GroupNorm)
    assert torch.equal(found.norm.weight, module.norm.weight)
    assert not list(found.buffers())
    assert isinstance(without_batch_norm(nn.BatchNorm1d(6)), nn.GroupNorm)
    with pytest.raises(ValueError, match="groups is 0, must be at least 1"):
        without_batch_norm(module, groups=0)


def test_frozen_statistics_stay_and_are_used() -> None:
    network = NETWORKS["frozen"]
    module, shared = network.module(), federation(network)
    run = fedge.train(fedge.FedAvg(module, epochs=1, batch_size=4), shared, rounds=2)
    assert not any(name.startswith(("stem", "norm.", "a.weight")) for name in run.params)
    sent = sum(leaf.nbytes for leaf in parameters(module).values())
    assert all(row.down == row.clients * sent for row in run.ledger)
    handle = run.handle
    assert not handle.module.norm.training
    assert torch.equal(handle.module.norm.running_mean, module.norm.running_mean)
    module.norm.train()
    with pytest.raises(
        ValueError, match=r"layer 'norm' \(BatchNorm2d\).*without_batch_norm.*call .eval\(\) on the layer"
    ):
        parameters(module)


def test_tied_weights_are_one_parameter_and_travel_once() -> None:
    params = parameters(Tied())
    assert "out.weight" not in params
    assert "embed.weight" in params


def test_adapters_start_as_the_model_and_only_they_are_trained() -> None:
    torch.manual_seed(0)
    module = Transformer().double()
    adapted = lora(module, rank=2, alpha=4, seed=3)
    x = NETWORKS["transformer"].examples(5)
    for mode in (True, False):
        with torch.no_grad():
            assert float((adapted.train(mode)(x) - module.train(mode)(x)).abs().max()) < 1e-12
    names = parameters(adapted)
    assert {name.rsplit(".", 1)[1] for name in names} == {"down", "up"}
    assert len(names) == 2 * 5, "two linear layers in each of two encoder layers, and the output"
    assert all(
        torch.equal(a, b)
        for a, b in zip(parameters(lora(module, rank=2, seed=3)).values(), names.values(), strict=True)
    )
    algorithm, shared = fedge.FedAvg(adapted, lr=0.5, epochs=2, batch_size=4), federation(NETWORKS["transformer"])
    run = fedge.train(algorithm, shared, rounds=2)
    adapted.load_state_dict(run.params, strict=False)
    assert close(run.params, names) > 1e-3
    with torch.no_grad():
        expected = adapted.eval()(x)
        assert float((merged(adapted).eval()(x) - expected).abs().max()) < 1e-12
        assert float((adapted.train()(x) - expected).abs().max()) < 1e-12, "evaluation does not skip the adapters"
        assert float((module.eval()(x) - expected).abs().max()) > 1e-3


def test_adapters_need_something_to_adapt() -> None:
    with pytest.raises(ValueError, match=r"no nn.Linear layer to adapt"):
        lora(nn.Sequential(nn.Conv2d(1, 1, 3)))
    with pytest.raises(ValueError, match="rank is 0"):
        lora(Tied(), rank=0)


@dataclass(frozen=True, eq=False)
class Careless(fedge.FedAvg):
    """Writes into what it was given."""

    into: str = "sent"

    def tasks(self, model):
        task = super().tasks(model)["train"]

        def step(sent, carry, batch: Batch):
            given = {"sent": sent["params"]["fc1.bias"], "carry": carry["params"]["fc1.bias"], "batch": batch.x}
            given[self.into] += 0.01
            return task.step(sent, carry, batch)

        return {"train": replace(task, step=step)}


@pytest.mark.parametrize("into", ["sent", "carry", "batch"])
@pytest.mark.parametrize("kind", ["loop-back", "single", "stacked"])
def test_a_step_that_writes_in_place_is_refused(into: str, kind: str) -> None:
    algorithm, shared = Careless(toy_model(), into=into), ragged(toy_data())
    link = Loopback(algorithm, shared) if kind == "loop-back" else Simulator(algorithm, shared, way=kind)
    with pytest.raises(Exception, match=r"wrote in place into its argument '(sent|carry|batch)'|vmap: inplace"):
        fedge.train(algorithm, shared, rounds=1, link=link)
