"""Codecs: what they send, byte by byte; what the server sees of it; and feedback against a plain loop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import vmap

import fedge
from fedge import keys
from fedge.core import Codec, Params, Task
from fedge.engine import Loopback, Simulator
from fedge.engine.uploads.coding import code, codec_key
from tests.cases import close, generator, ragged, toy_data


def part(seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    g = generator(seed)
    return {
        "weight": torch.randn(20, 7, generator=g).to(dtype),
        "bias": torch.randn(11, generator=g).to(dtype),
        "zero": torch.zeros(3, dtype=dtype),
    }


def key(word: int = 0) -> Tensor:
    return torch.tensor(keys.fold(5, word))


def nbytes(sent: Params) -> int:
    return sum(leaf.nbytes for leaf in sent.values())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantised_numbers_are_multiples_of_the_step_beside_the_true_ones(bits: int) -> None:
    codec, one = fedge.Quantise(bits), part()
    sent = codec.encode(one, key())
    seen = codec.decode(sent, one)
    assert nbytes(sent) == sum(-(-leaf.numel() * bits // 8) + 4 for leaf in one.values())
    for name, leaf in one.items():
        step = float(leaf.abs().max()) / (2 ** (bits - 1) - 1)
        assert float((seen[name] - leaf).abs().max()) <= step * (1 + 1e-5)
        if step:
            assert torch.allclose((seen[name] / step).round(), seen[name] / step, atol=1e-3)
    assert not seen["zero"].any()


@pytest.mark.parametrize("bits", [2, 8])
def test_quantisation_is_unbiased(bits: int) -> None:
    codec, one = fedge.Quantise(bits), part(dtype=torch.float64)
    many = torch.stack([codec.decode(codec.encode(one, key(word)), one)["weight"] for word in range(3000)])
    error = (many.mean(0) - one["weight"]).abs()
    noise = many.std(0) / 3000**0.5
    assert float((error / noise.clamp(min=1e-12)).max()) < 5  # of 140 numbers, in standard deviations
    assert not torch.equal(many[0], many[1])


def test_top_k_keeps_the_largest_of_the_whole_part() -> None:
    codec, one = fedge.TopK(0.1), part()
    sent = codec.encode(one, key())
    flat = torch.cat([leaf.flatten() for leaf in one.values()])
    count = round(0.1 * len(flat))
    assert nbytes(sent) == count * (4 + 4)
    seen = torch.cat([leaf.flatten() for leaf in codec.decode(sent, one).values()])
    kept = seen.nonzero().flatten()
    assert len(kept) == count
    assert torch.equal(seen[kept], flat[kept])
    least = flat.abs().sort(descending=True).values[count - 1]
    assert float(flat[kept].abs().min()) >= float(least) * (1 - 2**-7)  # those within half of their digits are equal
    assert set(flat.abs().sort(descending=True).indices[: count - 2].tolist()) <= set(kept.tolist())


@pytest.mark.parametrize(("dtype", "error"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_cast_rounds(dtype: str, error: float) -> None:
    codec, one = fedge.Cast(dtype), part()
    sent = codec.encode(one, key())
    assert nbytes(sent) == 2 * sum(leaf.numel() for leaf in one.values())
    seen = codec.decode(sent, one)
    assert all(float(((seen[n] - one[n]).abs() / one[n].abs().clamp(min=1e-3)).max()) <= error for n in one)


@pytest.mark.parametrize(
    "codec", [fedge.Quantise(8), fedge.Quantise(4), fedge.Quantise(2), fedge.TopK(0.2), fedge.Cast()]
)
def test_many_clients_at_once_give_the_bits_of_one_after_another(codec: Codec) -> None:
    ones, addresses = [part(seed) for seed in range(6)], torch.stack([key(word) for word in range(6)])
    stacked = {name: torch.stack([one[name] for one in ones]) for name in ones[0]}
    together = vmap(codec.encode, randomness="error")(stacked, addresses)
    for job, one in enumerate(ones):
        alone = codec.encode(one, addresses[job])
        assert all(torch.equal(together[name][job], leaf) for name, leaf in alone.items())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fedge.Quantise(3), r"bits is 3, it must be one of \[2, 4, 8\]"),
        (lambda: fedge.TopK(0), "share is 0, it must be above 0 and at most 1"),
        (lambda: fedge.Cast("fp8"), "dtype is 'fp8'"),
    ],
)
def test_impossible_codecs_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
    with pytest.raises(TypeError, match="codec is 8, it must be a codec such as"):
        fedge.Compressed(fedge.FedAvg(fedge.models.mlp(seed=0)), 8)


# -- in training


def model() -> torch.nn.Module:
    return fedge.models.mlp(6, (12,), 3, seed=1).double()


D, B = 6 * 12 + 12 + 12 * 3 + 3, 8
BYTES = {  # of one upload, without its weight, in float64
    "8 bits": (fedge.Quantise(8), D + 4 * B),
    "4 bits": (fedge.Quantise(4), 36 + 6 + 18 + 2 + 4 * B),
    "top": (fedge.TopK(0.05), round(0.05 * D) * (B + 4)),
    "cast": (fedge.Cast(), 2 * D),
}


@pytest.mark.parametrize("link", [Simulator, Loopback])
@pytest.mark.parametrize("name", BYTES)
def test_the_ledger_counts_what_is_encoded(name: str, link) -> None:
    codec, size = BYTES[name]
    algorithm, federation = fedge.Compressed(fedge.FedAvg(model(), epochs=1), codec), ragged(toy_data())
    run = fedge.train(algorithm, federation, rounds=2, cohort=5, link=link(algorithm, federation))
    assert [record["up_bytes"] for record in run.history] == [5 * (size + 4)] * 2
    assert [record["down_bytes"] for record in run.history] == [5 * D * B] * 2


def test_feedback_is_that_of_a_plain_loop() -> None:
    """u_k + e_k is encoded, and e_k is what the code left out; clients are away in some rounds."""
    federation, codec = ragged(toy_data()), fedge.TopK(0.1)
    inner = fedge.FedAvg(model(), lr=0.2, epochs=1, batch_size=None)
    run = fedge.train(fedge.Compressed(inner, codec), federation, rounds=6, cohort=4, seed=3)
    net, left = model(), {}
    w = {name: leaf.detach().clone() for name, leaf in net.named_parameters()}
    for record in run.history:
        total, weight = {name: torch.zeros_like(leaf) for name, leaf in w.items()}, 0
        for client in record["cohort"]:
            mine = federation.examples(client)
            x, y = federation.data.train_x[mine], federation.data.train_y[mine]
            net.load_state_dict(w)
            net.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            update = {name: -0.2 * leaf.grad for name, leaf in net.named_parameters()}
            before = left.get(client, {name: torch.zeros_like(leaf) for name, leaf in w.items()})
            whole = {name: update[name] + before[name] for name in w}
            flat = torch.cat([leaf.flatten() for leaf in whole.values()])
            kept = torch.zeros_like(flat)
            chosen = flat.abs().topk(round(0.1 * D)).indices
            kept[chosen] = flat[chosen]
            seen = dict(zip(w, kept.split([leaf.numel() for leaf in w.values()]), strict=True))
            left[client] = {name: whole[name] - seen[name].view_as(leaf) for name, leaf in w.items()}
            total = {name: leaf + len(y) * seen[name].view_as(leaf) for name, leaf in total.items()}
            weight += len(y)
        w = {name: leaf + total[name] / weight for name, leaf in w.items()}
    assert close(run.params, w) < 1e-10
    assert run.memory_bytes == len(left) * D * B


class Sign(Codec):
    """A codec of one's own: the signs, and one length."""

    def encode(self, part: Params, key: Tensor) -> Params:
        size = sum(leaf.numel() for leaf in part.values())
        scale = torch.stack([leaf.abs().sum() for leaf in part.values()]).sum() / size
        return {"scale": scale, **{f"{name} up": leaf > 0 for name, leaf in part.items()}}

    def decode(self, sent: Params, like: Params) -> Params:
        return {name: torch.where(sent[f"{name} up"], sent["scale"], -sent["scale"]) for name in like}


def test_a_codec_of_your_own_agrees_on_all_links() -> None:
    algorithm, federation = fedge.Compressed(fedge.FedAvg(model(), epochs=1), Sign()), ragged(toy_data())
    runs = [
        fedge.train(algorithm, federation, rounds=4, cohort=5, seed=3, link=link)
        for link in (
            Simulator(algorithm, federation),
            Simulator(algorithm, federation, chunk=1),
            Loopback(algorithm, federation),
        )
    ]
    assert max(close(runs[0].params, run.params) for run in runs[1:]) < 1e-10
    assert runs[0].history[0]["up_bytes"] == 5 * (B + D + 4)


SCRIPT = """
import sys, fedge
from pathlib import Path
from tests.cases import ragged, toy_data
from tests.test_codecs import Sign, model
rounds = int(sys.argv[2])
algorithm = fedge.Compressed(fedge.FedAvg(model(), epochs=1), Sign())
fedge.train(algorithm, ragged(toy_data()), rounds=rounds, cohort=5, out=sys.argv[1], resume=rounds > 2)
"""


def test_a_run_with_a_codec_of_your_own_goes_on_in_another_process(tmp_path: Path) -> None:
    for rounds in ("2", "3"):
        words = [sys.executable, "-c", SCRIPT, str(tmp_path / "a"), rounds]
        subprocess.run(words, check=True, cwd=Path(__file__).parent.parent)
    assert len((tmp_path / "a/rounds.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("share", [0.05, 0.1, 0.15, 0.5])
def test_rounding_does_not_choose_among_equal_magnitudes(share: float) -> None:
    """With two outputs, the updates of both are opposite but for rounding: every link must send the same of them."""
    inner = fedge.FedAvg(fedge.models.mlp(6, (12,), 2, seed=1).double(), lr=0.2, epochs=2, batch_size=4)
    algorithm, federation = fedge.Compressed(fedge.FedOVA(inner, classes=3), fedge.TopK(share)), ragged(toy_data())
    links = (
        Simulator(algorithm, federation),
        Simulator(algorithm, federation, chunk=1),
        Loopback(algorithm, federation),
    )
    runs = [fedge.train(algorithm, federation, rounds=4, cohort=5, seed=3, link=link) for link in links]
    assert max(close(runs[0].params, run.params) for run in runs[1:]) < 1e-10


def test_every_tensor_part_task_and_row_is_rounded_with_a_key_of_its_own() -> None:
    """The same numbers everywhere: only the keys can make the codes differ."""
    codec, leaf = fedge.Quantise(2), torch.linspace(-1, 1, 80)
    sent = codec.encode({"a": leaf, "b": leaf}, key())
    assert not torch.equal(sent["a.codes"], sent["b.codes"])
    task = Task(lambda s: s, lambda s, c, b: c, lambda s, c, n: ({}, n), codec=codec)
    done = code(task, {"one": {"a": leaf}, "two": {"a": leaf}}, {}, key())
    assert not torch.equal(done.sent["one"]["a.codes"], done.sent["two"]["a.codes"])
    client = torch.tensor(7)
    keys_ = {int(codec_key(client, position, torch.tensor(row))) for position in (0, 1) for row in (0, 1)}
    assert len(keys_) == 4


def test_feedback_of_two_tasks_is_kept_apart() -> None:
    inner = fedge.FisherLBFGS(model(), epochs=1, source="gradient", curvature="product", matrix="gauss_newton")
    algorithm, federation = fedge.Compressed(inner, fedge.TopK(0.1)), ragged(toy_data())
    run = fedge.train(algorithm, federation, rounds=2, cohort=5)
    assert set(run.memory) == {"left out of gradient/grad", "left out of product/product"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_quantised_without_bias_too(dtype: torch.dtype) -> None:
    codec, one = fedge.Quantise(8), {"w": torch.linspace(0.1, 0.9, 64).to(dtype)}
    many = torch.stack([codec.decode(codec.encode(one, key(word)), one)["w"].double() for word in range(2000)])
    assert float((many.mean(0) - one["w"].double()).abs().mean()) < {torch.float16: 3e-4, torch.bfloat16: 2e-3}[dtype]
    assert float(keys.uniform(5, torch.zeros(100_000, dtype=dtype)).max()) < 1


def test_few_numbers_travel_as_they_are() -> None:
    """The losses of an L-BFGS line search, and its short model: nothing is encoded, and nothing changes."""
    inner = fedge.FisherLBFGS(fedge.models.mlp(6, (3,), 3, seed=1).double(), epochs=1, candidates=(0.5, 1.0))
    coded, federation = fedge.Compressed(inner, fedge.TopK(0.01)), ragged(toy_data())
    plain, found = (fedge.train(a, federation, rounds=2, cohort=5, seed=3) for a in (inner, coded))
    assert close(plain.params, found.params) == 0
    assert plain.ledger.rows == found.ledger.rows


def test_what_is_not_finite_is_neither_used_nor_remembered() -> None:
    federation = ragged(toy_data())
    algorithm = fedge.Compressed(fedge.FedAvg(model().float(), lr=3e38, epochs=3, batch_size=4), fedge.TopK(0.1))
    with pytest.raises(fedge.engine.TooFewReplies, match="not finite"):
        fedge.train(algorithm, federation, rounds=3, cohort=5)
    link = Simulator(algorithm, federation)
    with pytest.raises(fedge.engine.TooFewReplies):
        fedge.train(algorithm, federation, rounds=3, cohort=5, link=link)
    assert all(torch.isfinite(leaf).all() for t in link.memory.tables.values() for leaf in t.leaves.values())
