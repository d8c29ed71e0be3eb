"""The GPU's kernels on the CPU: the same numbers as the plain handle, one job or many."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fedge
from fedge.core import Batch
from fedge.engine.recording.graph_passes import simplify, update_in_place
from fedge.handle import FastHandle, Handle, cross_entropy, parameters
from tests.cases import close, generator

MODELS = {
    "fmnist_cnn": (lambda: fedge.models.fmnist_cnn(seed=0), (1, 28, 28)),
    "kws_cnn": (lambda: fedge.models.kws_cnn(seed=0), (1, 50, 16)),
    "vgg11": (lambda: fedge.models.vgg11(seed=0), (3, 32, 32)),
    "wide": (
        lambda: nn.Sequential(nn.Conv2d(3, 80, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(320, 10)),
        (3, 2, 2),
    ),
    "strided": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 6, (3, 1), padding=(2, 0)), nn.ReLU(),
            nn.Conv2d(6, 4, 2, groups=2), nn.Conv2d(4, 4, 3, padding="same"), nn.Conv2d(4, 2, 1, bias=False),
            nn.Flatten(), nn.LazyLinear(10),
        ),
        (2, 9, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_gradients_agree_with_the_plain_handle(name: str) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    module = build()
    module(torch.zeros(1, *shape))
    module = module.double()
    g = generator(1)
    x = torch.randn(2, 3, *shape, generator=g, dtype=torch.float64)
    y = torch.randint(0, 10, (2, 3), generator=g)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    batch, params = Batch(x, y, mask, torch.arange(2)), parameters(module)
    plain, fast = Handle(module, cross_entropy), FastHandle(module, cross_entropy)
    for job in range(2):
        one = Batch(*(part[job] for part in batch))
        assert close(plain.grad(params, one), fast.grad(params, one)) < 1e-10
    stacked = [torch.func.vmap(handle.grad, (None, 0))(params, batch) for handle in (plain, fast)]
    assert close(*stacked) < 1e-10


@pytest.mark.parametrize("fuse", [False, True])
def test_rewriting_a_recording_changes_nothing(fuse: bool) -> None:
    model = fedge.models.mlp(6, (5,), 3, seed=0).double()
    handle, params = Handle(model, cross_entropy), parameters(model)
    names = list(params)
    g = generator(2)
    stacked = [leaf.expand(4, *leaf.shape).contiguous() for leaf in params.values()]
    x, y = torch.randn(4, 7, 6, generator=g, dtype=torch.float64), torch.randint(0, 3, (4, 7), generator=g)

    def step(*leaves):
        def one(params, x, y):
            grad = handle.grad(params, Batch(x, y, torch.ones_like(y, dtype=torch.bool), torch.tensor(0)))
            return {n: torch.add(params[n], grad[n], alpha=-0.1) for n in params}

        return list(torch.func.vmap(one)(dict(zip(names, leaves[:4], strict=True)), *leaves[4:]).values())

    expected = step(*stacked, x, y)
    graph = make_fx(step)(*stacked, x, y)
    before = len(graph.graph.nodes)
    simplify(graph)
    update_in_place(graph, range(4), fuse)
    assert len(graph.graph.nodes) < 0.8 * before
    assert ("baddbmm_" in graph.code) == fuse
    found = graph(*stacked, x, y)
    for new, old, wanted in zip(found, stacked, expected, strict=True):
        assert new.data_ptr() == old.data_ptr()  # in place
        assert float((new - wanted).abs().max()) < (1e-14 if fuse else 1e-300)
