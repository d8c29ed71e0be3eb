"""What people have: batch norm, replaced or frozen; adapters; tied and frozen weights; steps that write in place."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedge
from fedge.core import Batch
from fedge.engine import Loopback, Simulator
from fedge.engine.recording.untouched import untouched
from fedge.handle import parameters
from fedge.models import lora, merged, without_batch_norm
from tests.cases import close, ragged, toy_data, toy_model
from tests.networks import CLASSES, NETWORKS, WORDS, Normed, Tied, Transformer, federation, words


def test_batch_norm_becomes_group_norm_with_its_scale_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    module = Normed()
    with torch.no_grad():
        module.norm.weight += torch.arange(4)
    with caplog.at_level(logging.INFO, "fedge"):
        found = without_batch_norm(module, groups=4)
    assert [r.getMessage() for r in caplog.records] == [
        "batch norm replaced by group norm: 'norm' (1 group of 4), 'norms.0' (1 group of 6), 'norms.1' (1 group of 6)"
    ]
    assert isinstance(module.norm, nn.BatchNorm2d), "the given module is left alone"
    assert isinstance(found.norm, nn.GroupNorm)
    assert torch.equal(found.norm.weight, module.norm.weight)
    assert not list(found.buffers())
    assert isinstance(without_batch_norm(nn.BatchNorm1d(6)), nn.GroupNorm)
    with pytest.raises(ValueError, match="groups is 0, must be at least 1"):
        without_batch_norm(module, groups=0)


def test_a_group_has_enough_channels() -> None:
    wanted = {1: 1, 2: 1, 4: 1, 7: 1, 8: 2, 12: 3, 16: 4, 32: 8, 64: 8}
    assert {c: without_batch_norm(nn.BatchNorm2d(c)).num_groups for c in wanted} == wanted
    assert without_batch_norm(nn.BatchNorm2d(64), groups=4).num_groups == 4
    assert without_batch_norm(nn.BatchNorm1d(64)).num_groups == 1
    with pytest.raises(ValueError, match="layer '0' has no channels yet: run the lazy module on one batch first"):
        without_batch_norm(nn.Sequential(nn.LazyBatchNorm2d()))


@pytest.mark.parametrize("width", [8, 16])
def test_a_network_with_batch_norm_after_a_linear_layer_learns(width: int) -> None:
    """Inputs [B, C]: groups of one or two numbers would pass on their signs alone, and no gradient."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10))
    data = fedge.data.load("digits")
    shared = fedge.Federation(data, fedge.partition.iid(data.train_y, clients=20, seed=0))
    algorithm = fedge.FedAvg(without_batch_norm(module), epochs=2, batch_size=10, lr=0.1)
    run = fedge.train(algorithm, shared, rounds=8, cohort=10)
    assert run.history[-1]["test_accuracy"] > 0.7


def test_so_few_channels_that_nothing_is_left_are_named(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 8), nn.BatchNorm1d(8))
    with caplog.at_level(logging.WARNING, "fedge"):
        without_batch_norm(module)
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["'1'"]


def test_one_layer_with_two_names_is_one_layer_afterwards() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.a, self.inner = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6))
            self.same, self.b, self.inner[0] = self.norm, self.a, self.a

    found = without_batch_norm(Shared())
    assert isinstance(found.norm, nn.GroupNorm)
    assert found.norm is found.same
    adapted = lora(found, rank=2)
    assert adapted.a is adapted.b is adapted.inner[0]
    assert list(parameters(adapted)) == ["a.down", "a.up"]
    plain = merged(adapted)
    assert type(plain.a) is nn.Linear
    assert plain.a is plain.b is plain.inner[0]


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


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_a_spectral_norm_is_refused_unless_its_layer_is_frozen(norm: Callable[[nn.Module], nn.Module]) -> None:
    """Its vectors change in `forward`; fixed ones beside weights that are trained would no longer be theirs."""
    torch.manual_seed(0)
    module = nn.Sequential(norm(nn.Linear(6, 5)), nn.ReLU(), nn.Linear(5, 3))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"layer '0' has a spectral norm.*remove it.*or freeze the layer: .eval"):
            parameters(module)
        module[0].eval()
    module[0].requires_grad_(False)
    x, y = torch.randn(12, 6), torch.arange(12) % 3
    shared = fedge.Federation(fedge.data.from_arrays(x, y, x, y), [range(6), range(6, 12)])
    before = {name: one.clone() for name, one in module.named_buffers()}
    ends = [
        fedge.train(fedge.FedAvg(module, batch_size=3), shared, rounds=2, engine=fedge.Engine(way=way))
        for way in ("plain", "stacked")
    ]
    assert list(ends[0].params) == ["2.weight", "2.bias"]
    assert close(ends[0].params, ends[1].params) < 1e-5
    for run in ends:
        assert all(torch.equal(one, before[name]) for name, one in run.handle.module.named_buffers())


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


def test_a_named_part_is_trained_with_all_that_is_in_it() -> None:
    def net() -> nn.Module:
        parts = {"body": nn.Linear(3, 3), "head": nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 2)))}
        return nn.Sequential(OrderedDict(parts))

    names = ["body.down", "body.up", "head.0.weight", "head.0.bias", "head.1.0.weight", "head.1.0.bias"]
    assert list(parameters(lora(net(), train=("head",)))) == names
    with pytest.raises(ValueError, match=r"train names 'heat', which is no part of the model: 'body', 'head'"):
        lora(net(), train=("heat",))


def test_tied_weights_stay_tied_beside_adapters(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fedge"):
        adapted = lora(Tied(), rank=2)
    assert "tied weights stay as they are, without adapters: 'out'" in caplog.text
    assert list(parameters(adapted)) == ["mix.down", "mix.up"]
    for found in (adapted, merged(adapted)):
        assert found.out.weight is found.embed.weight
    assert list(parameters(lora(Tied(), rank=2, train=("out",))))[:1] == ["embed.weight"]
    with pytest.raises(ValueError, match=r"every nn.Linear layer \('out'\) has tied weights.*train="):
        lora(nn.Sequential(OrderedDict(embed=(tied := Tied()).embed, out=tied.out)))


WRITES = {
    "itself": lambda leaf: leaf.add_(0.01),
    "data": lambda leaf: leaf.data.add_(0.01),
    "numpy": lambda leaf: np.add(leaf.numpy(), 0.01, out=leaf.numpy()),
}


@dataclass(frozen=True, eq=False)
class Careless(fedge.FedAvg):
    """Writes into what it was given."""

    into: str = "sent"
    how: str = "itself"

    def tasks(self, model):
        task = super().tasks(model)["train"]

        def step(sent, carry, batch: Batch):
            given = {"sent": sent["params"]["fc1.bias"], "carry": carry["params"]["fc1.bias"], "batch": batch.x}
            WRITES[self.how](given[self.into])
            return task.step(sent, carry, batch)

        return {"train": replace(task, step=step)}


@pytest.mark.parametrize("into", ["sent", "carry", "batch"])
@pytest.mark.parametrize("kind", ["loop-back", "single", "stacked"])
def test_a_step_that_writes_in_place_is_refused(into: str, kind: str) -> None:
    algorithm, shared = Careless(toy_model(), into=into), ragged(toy_data())
    link = Loopback(algorithm, shared) if kind == "loop-back" else Simulator(algorithm, shared, way=kind)
    with pytest.raises(Exception, match=r"wrote in place into its argument '(sent|carry|batch)'|vmap: inplace"):
        fedge.train(algorithm, shared, rounds=1, link=link)


@pytest.mark.parametrize("into", ["sent", "carry", "batch"])
@pytest.mark.parametrize(
    ("kind", "how"),
    [("loop-back", "data"), ("loop-back", "numpy"), ("single", "numpy"), ("plain", "numpy"), ("stacked", "data")],
)
def test_a_write_that_torch_does_not_count_is_refused(into: str, kind: str, how: str) -> None:
    algorithm, shared = Careless(toy_model(), into=into, how=how), ragged(toy_data())
    link = Loopback(algorithm, shared) if kind == "loop-back" else Simulator(algorithm, shared, way=kind)
    # what is carried first is what was sent, and torch itself refuses most writes to what is stacked
    words = rf"wrote in place into its argument '(sent|{into})' past torch's count|`data` under vmap"
    with pytest.raises(Exception, match=words):
        fedge.train(algorithm, shared, rounds=1, link=link)


def test_numbers_that_are_none_are_not_taken_for_writes() -> None:
    given = {"a": torch.tensor([1.0, float("nan"), float("inf")])}
    with untouched(True, sent=given):
        pass
    with pytest.raises(RuntimeError, match="'sent' past torch's count"), untouched(True, sent=given):
        given["a"].data[0] = float("nan")


class Counting(nn.Module):
    """Mean of embeddings whose gradients are divided by how often a word is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, 4, scale_grad_by_freq=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.embed(x).mean(1))
        return found


def test_gradients_by_frequency_are_those_of_one_client() -> None:
    network = words(Counting)
    shared, own = federation(network), fedge.FedAvg(network.module(), epochs=2, batch_size=4, lr=0.2)
    expected = fedge.train(own, shared, rounds=2, link=Loopback(own, shared)).params
    assert close(fedge.train(own, shared, rounds=2).params, expected) < 1e-10
    for written in (True, False):
        with pytest.raises(RuntimeError, match=r'way="single".*scale_grad_by_freq=True cannot be stacked'):
            fedge.train(own, shared, rounds=1, link=Simulator(own, shared, way="stacked", written=written))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_a_largest_norm_is_refused_with_what_to_do(kind: type[nn.Embedding]) -> None:
    model = nn.Sequential(kind(WORDS, 4, max_norm=1.5), nn.Linear(4, CLASSES))
    with pytest.raises(ValueError, match=r"layer '0' \(Embedding.*max_norm=1.5, which shortens.*set max_norm to None"):
        parameters(model)
