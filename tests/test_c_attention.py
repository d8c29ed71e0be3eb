"""Attention and layer norms in C: the numbers of torch's own, and only where they are wanted and possible."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

import fedge
from fedge import once
from fedge.engine.recording import c_attention, c_dropout, c_layer_norm
from fedge.engine.recording.c_library import NoCompiler, there_is_a_compiler
from fedge.engine.recording.stacked_layers import stacked_in_c
from fedge.handle import attention
from fedge.handle.addressed_dropout import scaled_mask
from fedge.handle.stacked import Stacked
from tests.cases import close, generator, goes_on_as_it_began
from tests.in_c import drawn, forget, fresh_cache, is_used_unless_told_otherwise, trained
from tests.networks import NETWORKS, federation

pytestmark = pytest.mark.skipif(not there_is_a_compiler(), reason="no C compiler on this machine")
NETWORK = NETWORKS["transformer"]
PROGRAMS = (c_attention.program, c_layer_norm.program, c_dropout.program)


own_cache = fresh_cache(*PROGRAMS)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach()).abs().max() / b.detach().abs().max().clamp(min=1e-3))


def both(mine: Any, plain: Any, tensors: list[Tensor], slope: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Outcomes and gradients: ours in single precision, the plain ones in double."""
    own = [one.float().requires_grad_() for one in tensors]
    other = [one.clone().requires_grad_() for one in tensors]
    found, wanted = mine(*own), plain(*other)
    grads = torch.autograd.grad(found, own, slope.float()), torch.autograd.grad(wanted, other, slope)
    return [(found, wanted), *zip(*grads, strict=True)]


def causal(times: int, keys: int) -> Tensor:
    """Some keys are hidden from some queries, and none from all; the rest is added."""
    hidden = torch.ones(times, keys, dtype=torch.bool).triu(1)
    return drawn(times, keys, seed=9).masked_fill(hidden, -math.inf)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("masked", "dropped"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    "sizes", [(3, 2, 20, 4, 8), (2, 3, 7, 2, 5), (2, 2, 33, 1, 16), (1, 1, 1, 1, 1), (5, 1, 16, 2, 20)]
)
def test_attention_and_its_gradient_are_torch_s(
    sizes: tuple[int, ...], first: bool, masked: bool, dropped: bool, threads: int
) -> None:
    """Against its formula in double precision; widths that are no whole vectors."""
    jobs, batch, times, heads, width = sizes
    lead = (times, batch) if first else (batch, times)
    x, slope = (drawn(jobs, *lead, n * heads * width, seed=n) for n in (3, 1))
    mask = causal(times, times) if masked else None
    drop = 1.25 * (drawn(batch, heads, times, times, seed=4) < 0.8) if dropped else None

    def plain(x: Tensor) -> Tensor:
        x = x.transpose(1, 2) if first else x
        q, k, v = (part.unflatten(-1, (heads, width)).transpose(2, 3) for part in x.chunk(3, -1))
        scores = q @ k.mT / math.sqrt(width)
        weights = F.softmax(scores if mask is None else scores + mask, -1)
        out = ((weights if drop is None else weights * drop) @ v).transpose(2, 3).flatten(-2)
        return out.transpose(1, 2) if first else out

    def mine(x: Tensor) -> Tensor:
        whole = None if mask is None else mask.float().expand(batch, heads, times, times)
        return vmap(lambda one: c_attention.to_itself(one, heads, whole, drop, first))(x)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for a, b in both(mine, plain, [x], slope):
            assert relative(a, b) < 2e-6
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", ["a mask", "causal", "neither", "a mask per example", "a scale"])
@pytest.mark.parametrize("sizes", [(2, 3, 2, 5, 7, 4), (3, 1, 2, 18, 18, 9)])
def test_queries_and_keys_of_their_own_lie_anywhere(sizes: tuple[int, ...], shape: str) -> None:
    jobs, batch, heads, times, keys, width = sizes
    q = drawn(jobs, batch, times, heads, width, seed=0).transpose(2, 3)
    k = drawn(jobs, batch, heads, width, keys, seed=1).mT
    v = drawn(jobs, batch, heads, keys, width, seed=2)
    options: dict[str, Any] = {"a mask": {"attn_mask": causal(times, keys)}, "causal": {"is_causal": True}}.get(
        shape, {}
    )
    if shape == "a mask per example":
        options = {"attn_mask": torch.arange(keys).view(1, 1, 1, -1) <= torch.arange(batch).view(-1, 1, 1, 1) + 1}
    if shape == "a scale":
        options = {"scale": 0.2}

    def plain(*tensors: Tensor) -> Tensor:
        return torch.stack([F.scaled_dot_product_attention(*one, **options) for one in zip(*tensors, strict=True)])

    def mine(*tensors: Tensor) -> Tensor:
        single = {name: one.float() if one is not True and getattr(one, "dtype", None) == torch.float64 else one
                  for name, one in options.items()}  # fmt: skip
        found: Tensor = vmap(lambda *one: c_attention.product_attention(*one, **single))(*tensors)
        return found

    for a, b in both(mine, plain, [q, k, v], drawn(jobs, batch, heads, times, width, seed=3)):
        assert relative(a, b) < 2e-6


@pytest.mark.parametrize("shape", [(32,), (20,), (1,), (500,), (3, 8)])
def test_a_layer_norm_and_its_gradient_are_torch_s(shape: tuple[int, ...]) -> None:
    x, slope = 3 + 2 * drawn(3, 5, 2, *shape, seed=0), drawn(3, 5, 2, *shape, seed=1)
    weight, bias = drawn(3, *shape, seed=2), drawn(3, *shape, seed=3)

    def plain(*tensors: Tensor) -> Tensor:
        return torch.stack([F.layer_norm(x, shape, w, b, 1e-3) for x, w, b in zip(*tensors, strict=True)])

    def mine(*tensors: Tensor) -> Tensor:
        found: Tensor = vmap(lambda x, w, b: c_layer_norm.layer_norm(x, shape, w, b, 1e-3))(*tensors)
        return found

    for a, b in both(mine, plain, [x, weight, bias], slope):
        assert relative(a, b) < 2e-6


def test_what_nobody_may_see_is_nan_as_in_torch_and_far_scores_do_not_overflow() -> None:
    x = drawn(1, 1, 3, 3 * 4, seed=0).float()
    hidden = torch.zeros(1, 1, 3, 3)
    hidden[..., 1, :] = -torch.inf
    out = vmap(lambda one: c_attention.to_itself(one, 1, hidden, None, False))(x)[0, 0]
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    far = vmap(lambda one: c_attention.to_itself(one, 1, None, None, False))(1e4 * x)
    wanted = attention.to_itself(1e4 * x.double(), 1, None, None, False)
    assert relative(far, wanted) < 1e-6


class Reader(nn.Module):
    """Everything that has a program: both kinds of attention, with and without masks, time first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.own, self.late = (nn.MultiheadAttention(8, 2, batch_first=flag) for flag in (True, False))
        self.learned = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        words, causal = self.norm(self.embed(x)), torch.ones(4, 4, dtype=torch.bool).triu(1)
        padding = (x == 0) & (torch.arange(4) > 0)
        a, _ = self.own(words, words, words, key_padding_mask=padding, attn_mask=causal, need_weights=False)
        turned = a.transpose(0, 1)
        b, _ = self.late(turned, turned, turned, need_weights=False)
        c, _ = self.own(words, words, words, attn_mask=self.learned, need_weights=False)
        heads = words.unflatten(-1, (2, 4)).transpose(1, 2)
        d = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return self.out((b.transpose(0, 1) + c + d).mean(1))


def gradients(copies: list[nn.Module], x: Tensor, layers: dict[Any, Any]) -> dict[str, Tensor]:
    params, _ = stack_module_state(copies)  # type: ignore[arg-type]

    def forward(own: dict[str, Tensor], x: Tensor) -> Tensor:
        with Stacked(layers=layers):
            found: Tensor = functional_call(copies[0], own, x)
        return found

    out = vmap(forward)(params, x)
    return dict(zip(params, torch.autograd.grad(out.square().sum(), list(params.values())), strict=True))


def test_a_network_of_them_has_the_gradients_of_double_precision() -> None:
    """A mask that is learned is left to torch, and so has its gradient."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        copies = [Reader() for _ in range(3)]
    x = torch.randint(0, 9, (3, 5, 4), generator=generator(1))
    found = gradients(copies, x, stacked_in_c(copies[0]))
    wanted = gradients([copy.double() for copy in copies], x, {})
    assert max(relative(found[name], wanted[name]) for name in wanted) < 1e-5
    assert float(found["learned"].abs().max()) > 0


def test_what_has_no_program_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that are too long, heads and norms that are too wide, double precision, dropout."""

    def never(*_: Any) -> Any:
        raise AssertionError("a program was run")

    monkeypatch.setattr(c_attention, "_run", never)
    monkeypatch.setattr(c_layer_norm, "_run", never)
    long, wide = c_attention.LONGEST + 1, c_attention.WIDEST + 1
    for times, width, dtype in [(long, 2, torch.float32), (2, wide, torch.float32), (3, 4, torch.float64)]:
        x = drawn(2, 1, times, 3 * width, seed=0).to(dtype)
        found = vmap(lambda one: c_attention.to_itself(one, 1, None, None, False))(x)
        assert relative(found, attention.to_itself(x.double(), 1, None, None, False)) < 1e-5
    x, scale = drawn(2, 3, c_layer_norm.WIDEST + 1, seed=0).float(), torch.ones(2, c_layer_norm.WIDEST + 1)
    found = vmap(lambda x, w: c_layer_norm.layer_norm(x, w.shape, w, w))(x, scale)
    assert relative(found, F.layer_norm(x.double(), x.shape[2:]) + 1) < 1e-5
    q = drawn(1, 1, 2, 4, seed=0).float()
    assert c_attention.product_attention(q, q, q, dropout_p=0.5) is NotImplemented
    assert c_attention.product_attention(q[0], q[0], q[0]) is NotImplemented


def test_runs_use_them_unless_told_otherwise() -> None:
    is_used_unless_told_otherwise(NETWORK)


def test_dropout_within_attention_is_that_of_the_other_ways() -> None:
    """The masks have an address: one client after another, or all of them by torch's operations, draw the same."""
    shared, own = federation(NETWORKS["transformer, dropout"]), NETWORKS["transformer, dropout"].module().float()
    algorithm = fedge.FedAvg(own, epochs=1, batch_size=4, lr=0.1)
    settings = [{"way": "stacked"}, {"way": "stacked", "compile": False}, {"way": "plain"}]
    mine, stacked, plain = (
        fedge.train(algorithm, shared, rounds=2, engine=fedge.Engine(**one)).params for one in settings
    )
    assert 0 < close(mine, stacked) < 1e-5
    assert close(mine, plain) < 1e-5


def test_double_precision_and_other_networks_have_none() -> None:
    assert stacked_in_c(NETWORK.module()) == {}
    assert stacked_in_c(NETWORKS["residual"].module(torch.float32)) == {}
    assert F.layer_norm in stacked_in_c(NETWORKS["waves"].module(torch.float32))


def test_a_run_goes_on_as_it_began(tmp_path: Path) -> None:
    goes_on_as_it_began(trained(NETWORK), federation(NETWORK), tmp_path, way="stacked")


def test_without_a_program_torch_computes_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the compiler fails in the middle of a run; why is said once."""

    def nothing(text: str) -> Any:
        raise NoCompiler("no C compiler")

    own, shared = trained(NETWORK), federation(NETWORK)
    monkeypatch.setattr(once, "_TOLD", set())
    for module in (c_attention, c_layer_norm, c_dropout):
        monkeypatch.setattr(module, "load", nothing)
    forget(*PROGRAMS)
    try:
        with caplog.at_level(logging.INFO, "fedge"):
            run = fedge.train(own, shared, rounds=2, engine=fedge.Engine(way="stacked"))
    finally:
        forget(*PROGRAMS)
    plain = fedge.train(own, shared, rounds=2, engine=fedge.Engine(way="stacked", compile=False))
    assert close(run.params, plain.params) < 1e-6
    assert caplog.text.count("attention and layer norms are computed by torch's operations: no C compiler") == 1


@pytest.mark.parametrize("p", [0.1, 0.5, 1 / 3, 0.97])
@pytest.mark.parametrize("shape", [(7, 20), (3, 1, 1), (1,), (2, 4, 5, 5)])
def test_dropout_masks_are_the_same_to_the_bit(shape: tuple[int, ...], p: float) -> None:
    keys, like = torch.tensor([3, -5, 2**62 + 1]), torch.empty((), dtype=torch.float32)
    found = vmap(lambda key: c_dropout.scaled_mask(key, 2, torch.Size(shape), p, like))(keys)
    wanted = torch.stack([scaled_mask(key, 2, torch.Size(shape), p, like) for key in keys])
    assert torch.equal(found, wanted)
    double = vmap(lambda key: c_dropout.scaled_mask(key, 2, torch.Size(shape), p, like.double()))(keys)
    assert double.dtype == torch.float64
    assert torch.equal(double != 0, wanted != 0)
