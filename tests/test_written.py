"""Written-down gradients: what is a chain, and that its gradient is autograd's in every form the engine uses."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fedge
from fedge.core import Batch
from fedge.engine import Loopback, Simulator
from fedge.handle import Handle, NotAChain, WrittenHandle, cross_entropy, parameters
from fedge.handle.chain import read
from fedge.handle.layers.conv2d import Conv2d, layout
from fedge.handle.layers.max_pool2d import MaxPool2d
from fedge.handle.layers.relu import ReLU
from fedge.handle.tape import TERMS
from tests.cases import close, generator, ragged, toy_data

Layers = nn.Sequential


class Functional(nn.Module):
    """A forward as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(2, 3, 3), nn.Linear(27, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = F.dropout(x, p=0.4, training=self.training)
        return self.out(torch.tanh(x.view(x.size(0), -1)))


CHAINS = {
    "mlp": (lambda: fedge.models.mlp(6, (5, 4), 10, seed=0), (6,)),
    "linear on rows": (lambda: Layers(nn.Linear(4, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(15, 10)), (5, 4)),
    "fmnist_cnn": (lambda: fedge.models.fmnist_cnn(seed=0), (1, 28, 28)),
    "kws_cnn": (lambda: fedge.models.kws_cnn(seed=0), (1, 50, 16)),
    "vgg11": (lambda: fedge.models.vgg11(seed=0), (3, 32, 32)),
    "functional": (Functional, (2, 8, 8)),
    "odd": (
        lambda: Layers(
            nn.Tanh(), nn.Dropout(0.2), nn.Conv2d(2, 3, (3, 2), padding=(0, 1), bias=False), nn.Tanh(),
            nn.MaxPool2d((2, 3)), nn.Dropout(0.3), nn.Conv2d(3, 4, 2), nn.Identity(), nn.Sigmoid(), nn.Flatten(),
            nn.Linear(24, 10, bias=False), nn.Dropout(0.0),
        ),
        (2, 10, 9),
    ),
}  # fmt: skip


def stack(module: nn.Module, shape: tuple[int, ...], jobs: int = 3, size: int = 4) -> tuple[dict[str, Tensor], Batch]:
    """Different parameters per job, and a batch in which the second has padding."""
    g = generator(1)
    params = {
        name: torch.stack([leaf + 0.05 * torch.randn(leaf.shape, generator=g, dtype=leaf.dtype) for _ in range(jobs)])
        for name, leaf in parameters(module).items()
    }
    x = torch.randn(jobs, size, *shape, generator=g, dtype=torch.float64)
    x[0, 0] = 1.5  # a flat picture: every window of every pool is a tie
    mask = torch.ones(jobs, size, dtype=torch.bool)
    mask[1, 2:] = False
    return params, Batch(x, torch.randint(0, 10, (jobs, size), generator=g), mask, torch.arange(jobs) + 7)


def double(build) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_the_gradient_is_autograds(name: str, fused: bool) -> None:
    build, shape = CHAINS[name]
    module = double(build)
    plain, written = Handle(module, cross_entropy), WrittenHandle(module, cross_entropy, fused=fused)
    params, batch = stack(module, shape, jobs=2 if name == "vgg11" else 3)
    many = [torch.func.vmap(handle.grad)(params, batch) for handle in (plain, written)]
    assert close(*many) < 1e-10
    one, first = {n: leaf[1] for n, leaf in params.items()}, Batch(*(part[1] for part in batch))
    assert close(plain.grad(one, first), written.grad(one, first)) < 1e-10
    shared = [torch.func.vmap(handle.grad, (None, 0))(one, batch) for handle in (plain, written)]
    assert close(*shared) < 1e-10


@pytest.mark.parametrize("threshold", [1, 10**9])
def test_both_layouts_of_a_convolution_agree(threshold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product per job, and one per example."""
    monkeypatch.setattr("fedge.handle.layers.conv2d.enough", lambda x: threshold)
    test_the_gradient_is_autograds("fmnist_cnn", False)
    test_the_gradient_is_autograds("odd", True)


def test_a_large_batch_is_not_spelt_out_for_the_compiler() -> None:
    """Up to `TERMS` examples a sum is written term by term; beyond that, the recording no longer grows."""
    build, shape = CHAINS["odd"]
    module = double(build)
    plain, written = Handle(module, cross_entropy), WrittenHandle(module, cross_entropy, fused=True)
    assert TERMS >= 100, "the batches that were timed, B = 15 to 100, are written out"
    nodes = {}
    for size in (TERMS - 1, TERMS, TERMS + 1, TERMS + 60):
        params, batch = stack(module, shape, jobs=2, size=size)
        assert close(torch.func.vmap(plain.grad)(params, batch), torch.func.vmap(written.grad)(params, batch)) < 1e-10
        nodes[size] = len(make_fx(lambda p, b: torch.func.vmap(written.grad)(p, b))(params, batch).graph.nodes)
    assert nodes[TERMS - 1] < nodes[TERMS] > nodes[TERMS + 1] == nodes[TERMS + 60]


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_both_orders_of_a_picture_in_memory_agree(order: torch.memory_format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedge.handle.layers.conv2d.layout", lambda x, weight: order)
    test_the_gradient_is_autograds("fmnist_cnn", False)
    test_the_gradient_is_autograds("odd", True)


def test_wide_layers_on_small_pictures_stay_as_they_are() -> None:
    assert layout(torch.zeros(15, 512, 2, 2), torch.zeros(512, 512, 3, 3)) == torch.contiguous_format
    assert layout(torch.zeros(15, 16, 14, 14), torch.zeros(32, 16, 5, 5)) == torch.channels_last


def test_any_loss_is_differentiated() -> None:
    def smooth(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, reduction="none", label_smoothing=0.1) + z.square().sum(-1)

    module = double(CHAINS["mlp"][0])
    params, batch = stack(module, (6,))
    plain, written = Handle(module, smooth), WrittenHandle(module, smooth)
    assert close(*(torch.func.vmap(handle.grad)(params, batch) for handle in (plain, written))) < 1e-10


def test_half_precision_is_near_and_parameters_stay() -> None:
    module = fedge.models.fmnist_cnn(seed=0)
    params, batch = stack(module, (1, 28, 28))
    batch = batch._replace(x=batch.x.float())
    exact = torch.func.vmap(WrittenHandle(module, cross_entropy).grad)(params, batch)
    half = torch.func.vmap(WrittenHandle(module, cross_entropy, half=True).grad)(params, batch)
    for name, leaf in exact.items():
        assert half[name].dtype == torch.float32
        gap = float((half[name] - leaf).norm() / leaf.norm())
        assert 1e-5 < gap < 0.15, name


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x + F.relu(self.a(x)))


class Scale(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Depends(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) if x.sum() > 0 else self.b(self.a(x))


def hooked() -> nn.Module:
    module = nn.Linear(6, 3)
    module.register_forward_hook(lambda *args: None)
    return Layers(module)


def tied() -> nn.Module:
    layer = nn.Linear(6, 6)
    return Layers(layer, nn.ReLU(), layer)


def frozen() -> nn.Module:
    module = Layers(nn.Linear(6, 5), nn.Linear(5, 3))
    module[0].weight.requires_grad_(False)
    return module


NOT_CHAINS = {
    "a branch": (Branch, "beside the chain|goes to several places"),
    "a subclass": (lambda: Layers(Scale(6, 3)), "Scale|beside"),
    "a condition": (Depends, "cannot be followed"),
    "a hook": (hooked, "hooks"),
    "tied weights": (tied, "shared"),
    "frozen weights": (frozen, "'0.weight' is frozen"),
    "a norm": (
        lambda: Layers(nn.Linear(6, 4), nn.GroupNorm(2, 4)),
        r"'1' \(GroupNorm\) is no layer with a written gradient",
    ),
    "a stride": (lambda: Layers(nn.Conv2d(1, 1, 3, stride=2)), "stride"),
    "groups": (lambda: Layers(nn.Conv2d(2, 2, 3, groups=2)), "groups"),
    "overlap": (lambda: Layers(nn.Conv2d(1, 1, 3), nn.MaxPool2d(3, 2)), "overlaps"),
    "an argument": (lambda: Layers(nn.Linear(6, 3), nn.ELU()), "ELU"),
}


@pytest.mark.parametrize("name", NOT_CHAINS)
def test_everything_else_says_what_it_is(name: str) -> None:
    build, words = NOT_CHAINS[name]
    with pytest.raises(NotAChain, match=words):
        read(build())


def test_a_pool_goes_before_its_relu() -> None:
    layers = read(fedge.models.fmnist_cnn())
    assert [type(layer) for layer in layers[:3]] == [Conv2d, MaxPool2d, ReLU]


class Attention(nn.Module):
    """Takes the six inputs as two tokens of three."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(3, 1, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unflatten(1, (2, 3))
        return self.out(self.attend(tokens, tokens, tokens, need_weights=False)[0].flatten(1))


class Swish(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x.sigmoid()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * (s + x * s * (1 - s))


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Swish.apply(self.a(x)))


class Recurrent(nn.Module):
    """Reads the six inputs as a sequence of three."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(x.unflatten(1, (3, 2)))[0][:, -1])


@pytest.mark.parametrize("chunk", [None, 1, 2])
@pytest.mark.parametrize("build", [Attention, Custom])
def test_unusual_layers_train_through_the_fallback(build, chunk: int | None) -> None:
    torch.manual_seed(0)
    algorithm, federation = fedge.FedAvg(build().double(), epochs=2, batch_size=4), ragged(toy_data())
    link = Simulator(algorithm, federation, chunk=chunk)
    assert link.slower is not None
    settings = {"rounds": 3, "cohort": 4, "seed": 1}
    found = fedge.train(algorithm, federation, link=link, **settings)
    reference = fedge.train(algorithm, federation, link=Loopback(algorithm, federation), **settings)
    assert close(found.params, reference.params) < 1e-10


@pytest.mark.parametrize("chunk", [None, 1])
def test_a_recurrent_layer_trains_or_says_why_not(chunk: int | None) -> None:
    torch.manual_seed(0)
    algorithm, federation = fedge.FedAvg(Recurrent().double(), epochs=1, batch_size=4), ragged(toy_data())
    link = Simulator(algorithm, federation, chunk=chunk)
    reference = fedge.train(algorithm, federation, link=Loopback(algorithm, federation), rounds=2, cohort=4)
    found = fedge.train(algorithm, federation, link=link, rounds=2, cohort=4)
    assert close(found.params, reference.params) < 1e-10


def test_what_is_not_a_chain_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    federation = ragged(toy_data())
    with caplog.at_level(logging.INFO, "fedge"):
        for _ in range(2):
            module = Layers(nn.Linear(6, 3), nn.Softplus()).double()
            Simulator(fedge.FedAvg(module), federation)
        Simulator(fedge.FedAvg(fedge.models.mlp(6, (5,), 3).double()), federation)
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "the model is not a chain of known layers ('1' (Softplus) is no layer with a written gradient): "
        "clients are batched function by function"
    ]


@pytest.mark.parametrize("shape", [(3, 8, 6), (1, 8, 6), (2, 1, 8), (2, 8, 1)])
def test_examples_laid_out_for_evaluation_are_the_same_examples(shape: tuple[int, int, int]) -> None:
    module = nn.Sequential(nn.Conv2d(shape[0], 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)).double()
    x = torch.randn(7, *shape, dtype=torch.float64)
    with torch.no_grad():
        expected = module(x)
        handle = WrittenHandle(module, cross_entropy)
        there = handle.laid_out(x)
        found = handle.logits(dict(module.named_parameters()), there)
    assert torch.equal(there, x)
    assert there.stride(1) == 1, "the channels of a pixel lie side by side"
    assert (found - expected).abs().max() < 1e-12
    flat = torch.randn(7, 5)
    assert handle.laid_out(flat) is flat
