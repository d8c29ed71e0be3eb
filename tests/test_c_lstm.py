"""LSTM layers in C: the numbers of torch's own, and only where they are wanted and possible."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import _VF, Tensor

import fedge
from fedge.engine import Simulator
from fedge.engine.recording import c_library, c_lstm
from fedge.engine.recording.c_library import NoCompiler, there_is_a_compiler
from tests.cases import goes_on_as_it_began
from tests.in_c import drawn, fresh_cache, is_used_unless_told_otherwise, trained, uses_c
from tests.networks import NETWORKS, federation

pytestmark = pytest.mark.skipif(not there_is_a_compiler(), reason="no C compiler on this machine")
NETWORK = NETWORKS["lstm"]


own_cache = fresh_cache(c_lstm.library)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("jobs", "times", "examples", "inputs", "width"),
    [(3, 5, 4, 3, 5), (2, 4, 3, 16, 16), (2, 3, 7, 8, 20), (1, 1, 1, 1, 1), (5, 6, 10, 33, 64), (2, 2, 11, 4, 36)],
)
def test_a_layer_and_its_gradients_are_torch_s(
    jobs: int, times: int, examples: int, inputs: int, width: int, threads: int
) -> None:
    """Against nn.LSTM and autograd in double precision, client by client; sides that are no whole vectors."""
    x, h, c = (
        drawn(jobs, *shape, seed=i) for i, shape in enumerate([(examples, times, inputs), *[(examples, width)] * 2])
    )
    shapes = [(4 * width, inputs), (4 * width, width), (4 * width,), (4 * width,)]
    weights = [0.4 * drawn(jobs, *shape, seed=10 + i) for i, shape in enumerate(shapes)]
    slopes = [
        drawn(jobs, examples, times, width, seed=20),
        *(drawn(jobs, examples, width, seed=21 + i) for i in range(2)),
    ]
    mine = [one.float().requires_grad_() for one in (x, h, c, *weights)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = c_lstm.many(*mine)
        grads = torch.autograd.grad(found, mine, [one.float() for one in slopes])
    finally:
        torch.set_num_threads(before)
    for job in range(jobs):
        own = [one[job].requires_grad_() for one in (x, h, c, *weights)]
        out, last, cell = _VF.lstm(own[0], (own[1][None], own[2][None]), own[3:], True, 1, 0.0, True, False, True)
        expected = torch.autograd.grad((out, last[0], cell[0]), own, [one[job] for one in slopes])
        for a, b in zip((*found, *grads), (out, last[0], cell[0], *expected), strict=True):
            assert relative(a[job].detach(), b.detach()) < 3e-6


def test_far_values_saturate_and_nan_is_passed_on() -> None:
    x = torch.tensor([-1e30, -90.0, 90.0, 1e30, torch.inf, torch.nan]).view(6, 1, 1, 1)
    ones, zeros = torch.ones(6, 4, 1), torch.zeros(6, 1, 1)
    out = c_lstm.many(x, zeros, zeros, ones, zeros.expand(6, 4, 1))[0].flatten()
    high = float(torch.tanh(torch.tensor(1.0)))
    torch.testing.assert_close(out[:5], torch.tensor([0.0, 0.0, high, high, high]))
    assert out[5].isnan()


def test_small_values_keep_their_digits() -> None:
    """One unit, one step, no recurrence: h = s tanh(s tanh(x)), s = sigmoid(x), to float32's relative precision."""
    size = torch.logspace(-30, 1, 2001, dtype=torch.float64).float()
    x = torch.cat([size, -size])[:, None, None, None]
    zeros = torch.zeros(len(x), 1, 1)
    found = c_lstm.many(x, zeros, zeros, torch.ones(len(x), 4, 1), zeros.expand(-1, 4, 1))[0].double().flatten()
    x = x.double().flatten()
    gate = torch.sigmoid(x)
    expected = gate * torch.tanh(gate * torch.tanh(x))
    assert float(((found - expected) / expected).abs().max()) < 1e-6


def test_runs_use_them_unless_told_otherwise() -> None:
    is_used_unless_told_otherwise(NETWORK)


def test_double_precision_is_left_to_torch() -> None:
    own = fedge.FedAvg(NETWORK.module(), epochs=1, batch_size=4)
    assert not uses_c(Simulator(own, federation(NETWORK), way="stacked"), NETWORK)
    args = [one.double() for one in (drawn(2, 3, 4, 5, seed=0), *[drawn(2, 3, 6, seed=1)] * 2)]
    weights = [drawn(2, 24, 5, seed=2), drawn(2, 24, 6, seed=3)]
    assert c_lstm.many(*args, *weights)[0].dtype == torch.float64


def test_a_run_goes_on_as_it_began(tmp_path: Path) -> None:
    goes_on_as_it_began(trained(NETWORK), federation(NETWORK), tmp_path, way="stacked")


def test_without_a_compiler_torch_computes_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nothing(text: str) -> Any:
        raise NoCompiler("no C compiler")

    monkeypatch.setattr(c_lstm, "load", nothing)
    c_lstm.library.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "fedge"):
            assert not uses_c(Simulator(trained(NETWORK), federation(NETWORK), way="stacked"), NETWORK)
    finally:
        c_lstm.library.cache_clear()
    assert "LSTM layers are computed by torch's operations: no C compiler" in caplog.text
    assert c_library.there_is_a_compiler()


@pytest.fixture
def afresh() -> Iterator[None]:
    """Nothing is remembered of the compiler, before and after."""
    remembered = (c_library.compiler, c_lstm.library)
    for one in remembered:
        one.cache_clear()
    yield
    for one in remembered:
        one.cache_clear()


def cannot_run(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Programs of another machine, say."""
    for name in ("cc", "gcc", "clang"):
        (tmp_path / name).touch(mode=0o755)
    patch.delenv("CC", raising=False)
    patch.setenv("PATH", str(tmp_path))


def fails(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own cc").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "own cc").chmod(0o755)
    patch.setenv("CC", str(tmp_path / "own cc"))


def half_quoted(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setenv("CC", "ccache 'gcc")


def no_home(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    patch.delenv("XDG_CACHE_HOME", raising=False)
    patch.setattr(Path, "home", nobody)


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (cannot_run, r"the C compiler .*/cc \(.*Exec format error.* cannot run: repair it, set CC"),
        (fails, r"the C compiler .*own cc \(.*exit status 3.* cannot run"),
        (half_quoted, "there is no C compiler \\(ccache 'gcc\\)"),
        (no_home, r"compiled steps cannot be kept \(Could not determine home.*set XDG_CACHE_HOME or HOME"),
    ],
)
def test_a_broken_compiler_or_home_is_gone_without(
    break_it: Callable[[pytest.MonkeyPatch, Path], None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With one line in the log; whoever asks for C is told why there is none."""
    break_it(monkeypatch, tmp_path)
    own, shared = trained(NETWORK), federation(NETWORK)
    with caplog.at_level(logging.INFO, "fedge"):
        run = fedge.train(own, shared, rounds=2, engine=fedge.Engine(way="stacked"))
    assert run.rounds == 2
    told = [r.getMessage() for r in caplog.records if "computed by torch's operations" in r.getMessage()]
    assert len(told) == 1
    assert re.search(reason, told[0])
    assert not there_is_a_compiler()
    with pytest.raises(ValueError, match=f"compile is true, but {reason}"):
        fedge.train(own, shared, rounds=1, engine=fedge.Engine(compile=True))


@pytest.mark.usefixtures("afresh")
def test_a_compiler_may_have_words_before_and_after_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CC="ccache gcc" is what make understands."""
    known = c_library.compiler()[0]
    c_library.compiler.cache_clear()
    (tmp_path / "before").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "before").chmod(0o755)
    monkeypatch.setenv("CC", shlex.join([str(tmp_path / "before"), *known, "-g0"]))
    assert c_library.compiler()[0] == (str(tmp_path / "before"), *known, "-g0")
    assert c_library.load("int run(void) { return 5; }")[0]() == 5


@pytest.mark.usefixtures("afresh")
def test_the_next_compiler_is_taken_where_the_first_cannot_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    known = c_library.compiler()[0]
    c_library.compiler.cache_clear()
    (tmp_path / "cc").touch(mode=0o755)
    (tmp_path / "gcc").symlink_to(known[0])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert c_library.compiler()[0] == (str(tmp_path / "gcc"),)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this machine")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    """Those of the first process do not exist there: waiting for them would be forever."""
    x, state = torch.ones(4, 3, 2, 5), torch.zeros(4, 3, 6)
    args = (x, state, state, torch.ones(4, 24, 5), torch.ones(4, 24, 6))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            c_lstm.many(*args)
            if not (child := os.fork()):
                signal.alarm(20)
                c_lstm._forward(x.transpose(1, 2).contiguous(), *args[1:], torch.zeros(4, 24))
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(before)
