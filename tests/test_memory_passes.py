"""A recorded step that writes over what is spent, against the same step that does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fedge
from fedge.engine import Simulator
from fedge.engine.recording import recorder
from fedge.engine.recording.graph_passes import simplify
from fedge.engine.recording.memory_passes import reuse_memory, side_by_side
from tests.networks import NETWORKS, federation

aten = torch.ops.aten


def trained(name: str, way: Any) -> dict[str, Tensor]:
    network = NETWORKS[name]
    shared, own = federation(network), fedge.FedAvg(network.module(), epochs=2, batch_size=4, lr=0.2)
    return fedge.train(own, shared, rounds=3, link=Simulator(own, shared, way=way)).params


@pytest.mark.parametrize(
    "name", ["residual", "waves", "gru", "transformer, dropout", "attention", "tied", "no batch norm"]
)
@pytest.mark.parametrize("way", ["single", "stacked"])
def test_a_step_that_reuses_memory_gives_the_same_numbers(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = []

    def counted(module: GraphModule) -> None:
        before = [node.target for node in module.graph.nodes]
        reuse_memory(module)
        changed.append(sum(a is not b.target for a, b in zip(before, module.graph.nodes, strict=True)))

    monkeypatch.setattr(recorder, "reuse_memory", counted)
    found = trained(name, way)
    assert sum(changed) > 0, "nothing was recorded, or nothing reuses memory"
    monkeypatch.setattr(recorder, "reuse_memory", lambda module: None)
    for key, leaf in trained(name, way).items():
        assert torch.equal(leaf, found[key]), key


def recorded(step: Any, *args: Tensor) -> GraphModule:
    graph = make_fx(step)(*args)
    simplify(graph)
    side_by_side(graph)
    reuse_memory(graph)
    return graph


def read_again(x: Tensor) -> list[Tensor]:
    y = x.exp()
    return [y.relu(), y * 2]


def read_through_a_view(x: Tensor) -> list[Tensor]:
    y = x.exp()
    flat = y.view(-1)
    return [y.relu(), flat.sum()]


def returned(x: Tensor) -> list[Tensor]:
    y = x.exp()
    return [y, y.tanh()]


def of_the_input(x: Tensor) -> list[Tensor]:
    return [x.view(-1).relu(), x.view(-1).neg()]


def expanded(x: Tensor) -> list[Tensor]:
    return [x.exp()[:1].expand(4, 6).sigmoid() + x]


def both_halves(x: Tensor) -> list[Tensor]:
    first, second = x.exp().chunk(2)
    return [first.relu() + second, second.sum()]


def other_type(x: Tensor) -> list[Tensor]:
    return [(x.exp() > 1).float() + x.to(torch.float64).exp()]


def second_of_two(x: Tensor) -> list[Tensor]:
    return [x + x.exp(), x * x.tanh(), torch.add(x, x.sigmoid(), alpha=3), x - x.exp()]


def with_itself(x: Tensor) -> list[Tensor]:
    y = x.exp()
    z = (x @ x.T).exp()
    return [y * y, z.T + z]


STEPS = [read_again, read_through_a_view, returned, of_the_input, expanded]


@pytest.mark.parametrize("step", [*STEPS, both_halves, other_type, second_of_two, with_itself])
def test_what_is_read_later_is_not_written_over(step: Any) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    kept = x.clone()
    for found, wanted in zip(recorded(step, x)(x), step(kept), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(x, kept), "an input was overwritten"


def test_what_nobody_reads_any_more_is_written_over() -> None:
    graph = recorded(lambda x: [x.exp().relu().neg() + x, x * x.tanh()], torch.randn(3))
    targets = [node.target for node in graph.graph.nodes]
    for target in (aten.relu_.default, aten.neg_.default, aten.add_.Tensor, aten.mul_.Tensor):
        assert target in targets


def test_a_gradient_is_brought_into_the_order_of_its_image() -> None:
    def step(slope: Tensor, image: Tensor) -> list[Tensor]:
        return [aten.threshold_backward(slope.exp(), image, 0)]

    slope, image = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    graph = recorded(step, slope, image)
    assert torch.equal(graph(slope, image)[0], step(slope, image)[0])
    assert [node.target for node in graph.graph.nodes].count(aten.clone.default) == 1
    same = recorded(step, slope, image.contiguous())
    assert aten.clone.default not in [node.target for node in same.graph.nodes]
