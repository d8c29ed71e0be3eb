"""Networks that are not chains: gradients, squares and products against plain loops, through every engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fedge
from fedge import once
from fedge.core import Batch
from fedge.engine import Loopback, Simulator
from fedge.handle import GraphHandle, Handle, cross_entropy, parameters
from fedge.handle.stacked import Stacked
from tests.cases import close, generator
from tests.networks import CLASSES, NETWORKS, TIMES, WORDS, Network, federation, words
from tests.reference.curvature import fisher_diagonal, fisher_product, gauss_newton_product

JOBS, SIZE = 3, 4
pytestmark = pytest.mark.usefixtures("formula")


@pytest.fixture
def formula() -> Iterator[None]:
    """Attention by its formula, as within a run."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


Params = dict[str, Tensor]


def stack(network: Network, module: nn.Module) -> tuple[Params, Batch]:
    """Different parameters per job, and a batch in which the second has padding."""
    g = generator(1)
    params = {
        name: torch.stack([leaf + 0.1 * torch.randn(leaf.shape, generator=g, dtype=leaf.dtype) for _ in range(JOBS)])
        for name, leaf in parameters(module).items()
    }
    mask = torch.ones(JOBS, SIZE, dtype=torch.bool)
    mask[1, 2:] = False
    y = torch.randint(0, CLASSES, (JOBS, SIZE), generator=g)
    return params, Batch(network.examples(JOBS, SIZE), y, mask, torch.arange(JOBS) + 7)


def job(params: Params, batch: Batch, at: int) -> tuple[Params, Batch]:
    return {name: leaf[at] for name, leaf in params.items()}, Batch(*(part[at] for part in batch))


def by_hand(module: nn.Module, params: Params, batch: Batch) -> Params:
    """The gradient as anybody would write it: load, forward, backward."""
    module.load_state_dict(params, strict=False)
    module.zero_grad()
    F.cross_entropy(module(batch.x[batch.mask]), batch.y[batch.mask]).backward()
    return {name: leaf.grad.clone() for name, leaf in module.named_parameters() if leaf.requires_grad}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_gradient_is_that_of_a_loop(name: str) -> None:
    network = NETWORKS[name]
    module = network.module()
    params, batch = stack(network, module)
    handle, plain = GraphHandle(module, cross_entropy), Handle(module, cross_entropy)
    many = torch.func.vmap(handle.grad, randomness="error")(params, batch)
    for at in range(JOBS):
        own, mine = job(params, batch, at)
        expected = plain.grad(own, mine) if network.draws else by_hand(module, own, mine)
        assert close(handle.grad(own, mine), expected) < 1e-10
        assert close({key: leaf[at] for key, leaf in many.items()}, expected) < 1e-10
    shared = torch.func.vmap(handle.grad, (None, 0))(own, batch)
    for at in range(JOBS):
        assert (
            close({key: leaf[at] for key, leaf in shared.items()}, plain.grad(own, job(params, batch, at)[1])) < 1e-10
        )


@pytest.mark.parametrize("name", ["residual", "lstm, dropout", "frozen"])
def test_the_gradient_for_a_gpu_is_the_same(name: str) -> None:
    """Convolutions as products of patches and weights."""
    network = NETWORKS[name]
    module = network.module()
    params, batch = stack(network, module)
    handle, plain = GraphHandle(module, cross_entropy), Handle(module, cross_entropy)
    handle.program.patches = True
    found = torch.func.vmap(handle.grad, randomness="error")(params, batch)
    for at in range(JOBS):
        expected = plain.grad(*job(params, batch, at))
        assert close({key: leaf[at] for key, leaf in found.items()}, expected) < 1e-10


@pytest.mark.parametrize(
    "name", [name for name, network in NETWORKS.items() if not network.draws and name not in ("frozen", "adapters")]
)
def test_squares_and_products_are_those_of_single_examples(name: str) -> None:
    network = NETWORKS[name]
    module = network.module()
    params, batch = stack(network, module)
    handle = GraphHandle(module, cross_entropy)
    v = {
        key: torch.cos(torch.arange(leaf.numel(), dtype=leaf.dtype)).view_as(leaf)
        for key, leaf in parameters(module).items()
    }
    found = {
        "squares": torch.func.vmap(handle.sum_sq_grad)(params, batch),
        "fisher": torch.func.vmap(handle.sum_fisher_product, (0, 0, None))(params, batch, v),
        "gauss-newton": torch.func.vmap(handle.sum_gauss_newton_product, (0, 0, None))(params, batch, v),
    }
    for at in range(JOBS):
        own, mine = job(params, batch, at)
        module.load_state_dict(own, strict=False)
        x, y = mine.x[mine.mask], mine.y[mine.mask]
        expected = {
            "squares": fisher_diagonal(module, x, y),
            "fisher": fisher_product(module, x, y, v),
            "gauss-newton": gauss_newton_product(module, x, y, v),
        }
        for kind, wanted in expected.items():
            wanted = {key: len(y) * leaf for key, leaf in wanted.items()}
            assert close({key: leaf[at] for key, leaf in found[kind].items()}, wanted) < 1e-10, kind
        assert (
            close(handle.sum_sq_grad(own, mine), {k: len(y) * leaf for k, leaf in expected["squares"].items()}) < 1e-10
        )


@pytest.mark.parametrize("name", ["lstm, dropout", "transformer, dropout", "frozen", "adapters"])
def test_squares_with_dropout_or_frozen_parts_are_the_plain_handle_s(name: str) -> None:
    network = NETWORKS[name]
    module = network.module()
    params, batch = stack(network, module)
    plain, handle = Handle(module, cross_entropy), GraphHandle(module, cross_entropy)
    found = torch.func.vmap(handle.sum_sq_grad)(params, batch)
    assert close(found, torch.func.vmap(plain.sum_sq_grad)(params, batch)) < 1e-10
    assert all(float(leaf.abs().max()) > 0 for leaf in found.values())


def test_squares_of_many_examples_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedge.handle.per_example.MOST", 1)
    test_squares_and_products_are_those_of_single_examples("gru")


@pytest.mark.parametrize("name", NETWORKS)
def test_every_engine_trains_it_alike(name: str) -> None:
    network = NETWORKS[name]
    shared = federation(network)
    algorithm = fedge.FedAvg(network.module(), epochs=4, batch_size=4, lr=0.2)
    settings = {"rounds": 2, "seed": 1}  # enough steps to be recorded
    reference = fedge.train(algorithm, shared, link=Loopback(algorithm, shared), **settings)
    start = parameters(algorithm.model)
    assert close(reference.params, start) > 1e-3
    for options in ({"chunk": 1, "workers": 2}, {"chunk": 100}):
        found = fedge.train(algorithm, shared, link=Simulator(algorithm, shared, **options), **settings)
        assert close(found.params, reference.params) < 1e-10, options


@pytest.mark.parametrize("name", ["lstm", "residual", "transformer"])
def test_second_order_algorithms_train_it_in_single_precision(name: str) -> None:
    """torch's fused kernels for float32 have no forward derivative: they are not used where one is needed."""
    network = NETWORKS[name]
    shared = federation(network)
    model = network.module(torch.float32)
    for options in (
        {"curvature": "diagonal"},
        {"curvature": "product", "matrix": "gauss_newton", "source": "gradient"},
    ):
        algorithm = fedge.FisherLBFGS(model, epochs=1, batch_size=4, memory=2, lr=0.3, **options)
        runs = [
            fedge.train(algorithm, shared, rounds=2, link=link)
            for link in (
                Loopback(algorithm, shared),
                Simulator(algorithm, shared),
                Simulator(algorithm, shared, chunk=100),
            )
        ]
        assert max(close(runs[0].params, run.params) for run in runs[1:]) < 1e-3


class InPlace(nn.Module):
    """Operations in place on what layers put out, as is often written."""

    def __init__(self, layer: str, examples: nn.Module) -> None:
        super().__init__()
        self.into, self.layer, self.out = examples, LAYERS[layer](), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        out = self.layer(x)
        out = out[0] if isinstance(out, tuple) else out
        out += x
        return self.out(F.relu(out, inplace=True).flatten(2).mean(1))


LAYERS = {
    "linear": lambda: nn.Linear(4, 4),
    "linear without bias": lambda: nn.Linear(4, 4, bias=False),
    "layer norm": lambda: nn.LayerNorm(4),
    "group norm": lambda: nn.GroupNorm(2, TIMES),
    "convolution": lambda: nn.Conv1d(TIMES, TIMES, 3, padding=1),
    "gru": lambda: nn.GRU(4, 4, batch_first=True),
    "lstm": lambda: nn.LSTM(4, 4, batch_first=True),
    "embedding": nn.Identity,
}


@pytest.mark.parametrize("layer", LAYERS)
def test_operations_in_place_after_a_layer_are_right(layer: str) -> None:
    network = words(lambda: InPlace(layer, nn.Embedding(WORDS, 4)))
    module = network.module()
    params, batch = stack(network, module)
    handle = GraphHandle(module, cross_entropy)
    many = torch.func.vmap(handle.grad)(params, batch)
    shared = torch.func.vmap(handle.grad, (None, 0))(job(params, batch, 0)[0], batch)
    for at in range(JOBS):
        own, mine = job(params, batch, at)
        expected = by_hand(module, own, mine)
        assert close(handle.grad(own, mine), expected) < 1e-10
        assert close({key: leaf[at] for key, leaf in many.items()}, expected) < 1e-10
        expected = by_hand(module, job(params, batch, 0)[0], mine)
        assert close({key: leaf[at] for key, leaf in shared.items()}, expected) < 1e-10


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(3, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), 2)
        packed = nn.utils.rnn.pack_padded_sequence(x.unflatten(1, (2, 3)), lengths, batch_first=True)
        return self.out(self.rnn(packed)[1][0])


class Flattening(nn.Module):
    """A recurrent net that asks for one block of weights itself, as is often written."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.out = kind(3, 5, 2, batch_first=True).double(), nn.Linear(5, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()
        found: Tensor = self.out(self.rnn(x)[0][:, -1])
        return found


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_weights_are_not_moved_as_on_a_gpu(kind: type[nn.RNNBase], monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch asks where new weights lie, and moves them: those of many clients lie nowhere."""
    moved: list[int] = []
    module = Flattening(kind)

    def flatten(self: nn.RNNBase) -> None:
        moved.extend(weight.data_ptr() for weight in self.parameters())

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten)
    module(torch.zeros(1, 2, 3, dtype=torch.float64))
    assert moved, "torch no longer calls it by this name"
    handle = GraphHandle(module, cross_entropy)
    moved.clear()
    params = {name: torch.stack([leaf.detach(), 2 * leaf.detach()]) for name, leaf in module.named_parameters()}
    x = torch.randn(2, SIZE, 6, 3, generator=generator(2), dtype=torch.float64)
    batch = Batch(x, torch.arange(SIZE).expand(2, -1) % CLASSES, torch.ones(2, SIZE, dtype=torch.bool), torch.arange(2))
    found = torch.func.vmap(handle.grad)(params, batch)
    assert not moved
    for at in range(2):
        own, mine = job(params, batch, at)
        assert close({name: leaf[at] for name, leaf in found.items()}, by_hand(module, own, mine)) < 1e-10


def test_packed_sequences_are_refused_with_what_to_do() -> None:
    network = Network(Packing, (6,))
    shared, algorithm = federation(network), fedge.FedAvg(network.module())
    for link in (Loopback(algorithm, shared), Simulator(algorithm, shared), Simulator(algorithm, shared, chunk=1)):
        with pytest.raises(Exception, match=r"packs its sequences.*pad them instead"):
            fedge.train(algorithm, shared, rounds=1, link=link)


def test_what_has_no_batched_form_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "_TOLD", set())
    for _ in range(2):
        test_the_gradient_is_that_of_a_loop("rnn")
    assert [record.getMessage() for record in caplog.records] == [
        "the model's function rnn_relu has no batched form and is called client by client"
    ]


def test_attention_with_dropout_and_further_keys_is_refused() -> None:
    class Further(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(3, 1, dropout=0.2, add_zero_attn=True, batch_first=True)
            self.out = nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = x.unflatten(1, (2, 3))
            return self.out(self.attend(x, x, x)[0].flatten(1))

    network = Network(Further, (6,))
    module = network.module()
    with pytest.raises(ValueError, match=r"attention has dropout=0.2 with bias_k.*set its dropout to 0"):
        Handle(module, cross_entropy).grad(*job(*stack(network, module), 0))


@pytest.mark.parametrize("weights", [False, True])
def test_attention_written_out_is_torch_s(weights: bool) -> None:
    g = generator(3)
    layer = NETWORKS["attention"].module().mine
    x = torch.randn(3, 5, 4, generator=g, dtype=torch.float64)
    padding = torch.zeros(3, 5, dtype=torch.float64)
    padding[1, 3:] = -torch.inf
    options = {"key_padding_mask": padding, "attn_mask": torch.randn(6, 5, 5, generator=g, dtype=torch.float64)}
    for more in ({}, options):
        expected = layer(x, x, x, need_weights=weights, average_attn_weights=False, **more)
        with Stacked():
            found = layer(x, x, x, need_weights=weights, average_attn_weights=False, **more)
        assert float((found[0] - expected[0]).detach().abs().max()) < 1e-12
        assert (found[1] is None) == (not weights)
        if weights:
            assert float((found[1] - expected[1]).detach().abs().max()) < 1e-12


class Late(nn.Module):
    """Dropout, or another draw, from the third pass on."""

    def __init__(self, draw: str) -> None:
        super().__init__()
        self.first, self.out, self.draw, self.passes = nn.Linear(6, 5), nn.Linear(5, CLASSES), draw, 0

    def forward(self, x: Tensor) -> Tensor:
        x, self.passes = torch.tanh(self.first(x)), self.passes + 1
        if self.passes > 2:
            x = F.dropout(x, 0.5, self.training) if self.draw == "dropout" else x * torch.rand(5)
        return self.out(x)


def test_draws_that_begin_late_are_addressed_or_refused() -> None:
    """After passes without any, functions of torch are no longer looked at one by one."""
    network = Network(lambda: Late("dropout"), (6,))
    module = network.module()
    own, mine = job(*stack(network, module), 1)
    handle = GraphHandle(module, cross_entropy)
    still = [handle.grad(own, mine) for _ in range(2)]
    assert close(*still) == 0
    state = torch.get_rng_state()
    late = [handle.grad(own, mine) for _ in range(2)]
    assert torch.equal(state, torch.get_rng_state())
    module.passes = 5
    plain = Handle(module, cross_entropy)
    assert close(late[0], plain.grad(own, mine)) < 1e-12
    assert close(*late) == 0 < close(late[0], still[0])

    handle = GraphHandle(Network(lambda: Late("rand"), (6,)).module(), cross_entropy)
    for _ in range(2):
        handle.grad(own, mine)
    with pytest.raises(RuntimeError, match="random operation 'rand'"):
        handle.grad(own, mine)
