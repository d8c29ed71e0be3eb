"""Examples of several inputs, by name and in order, and of different lengths: as a plain loop computes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedge
from fedge.edge import Clock, Profiles
from fedge.engine import Loopback
from fedge.engine.links import wire
from tests.test_problems import LISTS, WAYS, agrees, generator, linear


class Both(nn.Module):
    """Some numbers and a word, by name or in order."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, dtype=torch.float64)
        self.out = linear(4 + 5, outputs)
        with torch.no_grad():
            self.embed.weight.copy_(torch.linspace(-1, 1, 24).view(6, 4))

    def forward(self, table: Tensor, word: Tensor) -> Tensor:
        return self.out(torch.cat([table, torch.tanh(self.embed(word))], 1))


def both(named: bool, regression: bool = False) -> fedge.data.Data:
    g = generator()
    table, word = torch.randn(50, 5, generator=g, dtype=torch.float64), torch.randint(6, (50,), generator=g)
    y = table[:, :3].argmax(1) if not regression else table[:, :3] * 2
    x = {"table": table, "word": word} if named else (table, word)
    parts = [
        {name: part[some] for name, part in x.items()} if isinstance(x, dict) else tuple(part[some] for part in x)
        for some in (slice(30), slice(30, None))
    ]
    return fedge.data.from_arrays(parts[0], y[:30], parts[1], y[30:])


def called(model: nn.Module, x: dict | tuple, some: list | slice) -> Tensor:
    if isinstance(x, dict):
        return model(**{name: part[some] for name, part in x.items()})
    return model(*(part[some] for part in x))


def plain_step(model: nn.Module, data: fedge.data.Data, lr: float) -> dict[str, Tensor]:
    """FedAvg with one full-batch step per client."""
    loss = F.mse_loss if data.classes == 0 else F.cross_entropy
    mean = {name: torch.zeros_like(leaf) for name, leaf in model.named_parameters()}
    for chosen in map(list, LISTS):
        out = called(model, data.train_x, chosen)
        grads = torch.autograd.grad(loss(out, data.train_y[chosen]), list(model.parameters()))
        for name, grad in zip(mean, grads, strict=True):
            mean[name] += len(chosen) * grad / 30
    return {name: leaf.detach() - lr * mean[name] for name, leaf in model.named_parameters()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("regression", [True, False])
def test_several_inputs_train_as_a_plain_loop(way: str, named: bool, regression: bool) -> None:
    data, model = both(named, regression), Both()
    algorithm = fedge.FedAvg(model, lr=0.3, epochs=1, batch_size=None)
    run = fedge.train(algorithm, fedge.Federation(data, LISTS), rounds=1, engine=fedge.Engine(way=way))  # type: ignore[arg-type]
    wanted = plain_step(model, data, 0.3)
    agrees(run, wanted)
    model.load_state_dict(wanted)
    out = called(model, data.test_x, slice(None)).detach()
    assert torch.allclose(run.scores(data.test_x), out, atol=1e-10)
    assert torch.equal(run.predict(data.test_x), run.scores(data.test_x) if regression else out.argmax(1))


@pytest.mark.parametrize("written", [True, False])
def test_many_steps_agree_on_all_links_and_recorded(written: bool) -> None:
    """Batches of one size, ragged clients, enough steps to be recorded."""
    from fedge.engine import Simulator

    data = both(named=True)
    federation, algorithm = fedge.Federation(data, LISTS), fedge.FedAvg(Both(), lr=0.1, epochs=8, batch_size=3)
    link = Simulator(algorithm, federation, written=written, chunk=3)
    one = fedge.train(algorithm, federation, rounds=3, link=link)
    other = fedge.train(algorithm, federation, rounds=3, link=Loopback(algorithm, federation))
    agrees(one, other.params)
    assert one.history[-1]["test_loss"] == pytest.approx(other.history[-1]["test_loss"], rel=1e-9)


@pytest.mark.parametrize(
    "algorithm",
    [
        lambda: fedge.FisherLBFGS(Both(), lr=0.05),
        lambda: fedge.SubspaceNewton(Both(), epochs=1),
        lambda: fedge.FedOVA(fedge.FedAvg(Both(2)), classes=3),
        lambda: fedge.DataSharing(fedge.Compressed(fedge.FedAvg(Both()), fedge.Quantise(8)), beta=0.2),
    ],
)
def test_other_algorithms_take_several_inputs(algorithm) -> None:
    data, made = both(named=True), algorithm()
    federation = fedge.Federation(data, LISTS)
    one = fedge.train(made, federation, rounds=2, engine=fedge.Engine(way="stacked"))
    other = fedge.train(made, federation, rounds=2, link=Loopback(made, federation))
    for name, leaf in one.params.items():
        assert torch.allclose(leaf, other.params[name], atol=1e-7), name


@pytest.mark.parametrize("asynchronous", [False, True])
def test_devices_with_a_clock_take_several_inputs(asynchronous: bool) -> None:
    data, algorithm = both(named=True, regression=True), fedge.FedAvg(Both(), lr=0.1, epochs=1, batch_size=4)
    federation = fedge.Federation(data, LISTS)
    chosen = fedge.FedBuff(algorithm, buffer=2) if asynchronous else algorithm
    link = Clock(fedge.Engine().link(chosen, federation), federation, Profiles("phone"))
    run = fedge.train(chosen, federation, rounds=2, link=link)
    assert all(record["virtual_seconds"] > 0 for record in run.history)
    if not asynchronous:
        agrees(run, fedge.train(algorithm, federation, rounds=2).params)


def test_a_run_of_several_inputs_is_saved_and_loaded(tmp_path: Path) -> None:
    data, algorithm = both(named=True), fedge.FedAvg(Both(), epochs=1)
    federation = fedge.Federation(data, LISTS)
    run = fedge.train(algorithm, federation, rounds=1, out=tmp_path / "run")
    fedge.train(algorithm, federation, rounds=2, out=tmp_path / "run", resume=True)
    again = fedge.load_run(tmp_path / "run", algorithm)
    assert again.rounds == 2
    assert {name: tuple(part.shape) for name, part in again.example.items()} == {"table": (1, 5), "word": (1,)}
    module = again.module()
    assert torch.allclose(again.scores(data.test_x), module(**data.test_x), atol=1e-12)
    program = torch.export.load(run.save(tmp_path / "net.pt2")).module()
    assert torch.allclose(run.scores(data.test_x), program(**data.test_x), atol=1e-12)


def test_fedova_of_several_inputs_is_one_module() -> None:
    data, algorithm = both(named=True), fedge.FedOVA(fedge.FedAvg(Both(2), epochs=1), classes=3)
    run = fedge.train(algorithm, fedge.Federation(data, LISTS), rounds=1)
    assert torch.allclose(run.module()(**data.test_x), run.scores(data.test_x), atol=1e-12)


def test_inputs_that_do_not_agree_are_named() -> None:
    x, y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    with pytest.raises(ValueError, match=r"train_x\['b'\] has 3 examples and train_y 4"):
        fedge.data.from_arrays({"a": x, "b": x[:3]}, y, {"a": x, "b": x}, y)
    with pytest.raises(ValueError, match=r"train_x has \[\"x\['a'\]\"\] and test_x \[\"x\['b'\]\"\]: both parts"):
        fedge.data.from_arrays({"a": x}, y, {"b": x}, y)
    with pytest.raises(ValueError, match=r"train_x\[0\] has NaN"):
        fedge.data.from_arrays((x / 0, x), y, (x, x), y)
    data = both(named=True)
    with pytest.raises(
        ValueError, match=r"cannot take an example of 'table' of shape \[5\] and type torch.float32, 'w"
    ):
        fedge.train(fedge.FedAvg(nn.Linear(5, 3)), fedge.Federation(data, LISTS), rounds=1)


def test_several_inputs_travel_as_they_are() -> None:
    """What a server shares with devices: the messages of a fleet hold dicts and tuples of tensors."""
    for named in (True, False):
        x = both(named, regression=True).train_x
        message = wire.decode(wire.encode({"x": x, "y": torch.zeros(3, 2)}))
        assert type(message["x"]) is type(x)
        parts = zip(*(list(one.values()) if named else list(one) for one in (message["x"], x)), strict=True)
        assert all(torch.equal(one, other) for one, other in parts)


# Sequences of different lengths


class Words(Dataset):
    """Sequences whose label is that of their first and last word."""

    def __init__(self, count: int, seed: int, steps: bool = False) -> None:
        g = generator(seed)
        lengths = torch.randint(2, 7, (count,), generator=g).tolist()
        self.items = [torch.randint(1, 5, (n,), generator=g) for n in lengths]
        self.steps = steps

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor | int]:
        x = self.items[at]
        return (x, (x + 1) % 5) if self.steps else (x, int(x[0] > x[-1]))


class Reader(nn.Module):
    """An LSTM whose output is taken at each sequence's last step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(5, 6), nn.LSTM(6, 8, batch_first=True)
        self.out = nn.Linear(8, 2)
        g = generator(2)
        with torch.no_grad():
            for leaf in self.parameters():
                leaf.copy_(torch.randn(leaf.shape, generator=g) / 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        steps = self.rnn(self.embed(x))[0]
        last = (lengths - 1).view(-1, 1, 1).expand(-1, 1, steps.shape[2])
        return self.out(steps.gather(1, last)[:, 0])


def test_padding_is_inert() -> None:
    """More padding, or other numbers in it, change no parameter; an unpadded loop gives the same."""

    def run(length: int | None, value: int) -> fedge.Run:
        def collate(items: list) -> tuple:
            return fedge.data.pad(items, value=value, length=length)

        data = fedge.data.from_datasets(Words(30, 0), Words(10, 1), collate=collate)
        algorithm = fedge.FedAvg(Reader().double(), lr=0.3, epochs=2, batch_size=4)
        return fedge.train(algorithm, fedge.Federation(data, LISTS), rounds=2)

    first = run(None, 0)
    agrees(first, run(11, 0).params)
    agrees(first, run(None, 3).params)

    module, train = Reader().double(), Words(30, 0)
    once = fedge.FedAvg(module, lr=0.3, epochs=1, batch_size=None)
    data = fedge.data.from_datasets(train, Words(10, 1), collate=fedge.data.pad)
    one = fedge.train(once, fedge.Federation(data, [range(30)]), rounds=1)
    each = [
        F.cross_entropy(module(x[None], torch.tensor([len(x)])), torch.tensor([y]))
        for x, y in map(train.__getitem__, range(30))
    ]
    grads = torch.autograd.grad(torch.stack(each).mean(), list(module.parameters()))
    moved = zip(module.named_parameters(), grads, strict=True)
    agrees(one, {name: leaf.detach() - 0.3 * grad for (name, leaf), grad in moved})


def test_labels_of_padded_steps_do_not_count() -> None:
    data = fedge.data.from_datasets(Words(6, 0, steps=True), Words(3, 1, steps=True), collate=fedge.data.pad)
    assert data.train_y.shape == data.train_x["x"].shape
    for x, y, n in zip(data.train_x["x"], data.train_y, data.train_x["lengths"].tolist(), strict=True):
        assert torch.equal(y[:n], (x[:n] + 1) % 5)
        assert (y[n:] == -100).all()


def test_what_cannot_be_collated_is_refused() -> None:
    with pytest.raises(ValueError, match=r"resize or crop .* or give a collate such as fedge.data.pad"):
        fedge.data.from_datasets(Words(9, 0), Words(3, 1))
    with pytest.raises(ValueError, match="length is 2, but there is an example of length 6: raise it, or cut them"):
        fedge.data.pad([(torch.zeros(6), 1)], length=2)
    with pytest.raises(ValueError, match="collate returned 2 x and 2 y for 12 items"):
        fedge.data.from_datasets(
            Words(9, 0), Words(3, 1), collate=lambda items: (torch.zeros(2, 1), torch.zeros(2, dtype=torch.long))
        )
    with pytest.raises(ValueError, match="y has one number per step, and steps differ"):
        fedge.data.pad([(torch.zeros(2), torch.zeros(2)), (torch.zeros(3), torch.zeros(3))])
