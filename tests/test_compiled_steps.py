"""Steps of small models as C programs: the same numbers as the steps themselves, or they are not used."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fedge
from fedge import once
from fedge.bench.check import algorithms, problem
from fedge.engine import Simulator
from fedge.engine.recording import c_library, c_source
from fedge.engine.recording.c_library import there_is_a_compiler
from fedge.engine.recording.c_source import RULES, pointwise
from tests.cases import close

pytestmark = pytest.mark.skipif(not there_is_a_compiler(), reason="no C compiler on this machine")
ALL_IN_C = ("fedavg", "fedavg momentum", "fedavg adam", "fedavg clip", "scaffold", "fedova", "data sharing")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(once, "_TOLD", set())
    return tmp_path / "fedge" / "steps"


def programs(link: Simulator) -> list[Any]:
    return [one for fold in link._folds.values() for one in fold.native.programs.values()]


def trained(algorithm: Any, federation: Any, **options: Any) -> tuple[Any, Simulator]:
    link = Simulator(algorithm, federation, **options)
    return fedge.train(algorithm, federation, rounds=3, cohort=6, seed=5, link=link), link


@pytest.mark.parametrize("name", [*ALL_IN_C, "fedper", "feddane", "subspace newton"])
def test_compiled_steps_agree_in_double_precision(name: str) -> None:
    """Clients of different sizes, three rounds, to 1e-10."""
    federation, algorithm = problem(False), algorithms(False)[name]
    plain, _ = trained(algorithm, federation, chunk=100)
    found, link = trained(algorithm, federation, chunk=100, compile=True)
    assert close(plain.params, found.params) < 1e-10
    made = programs(link)
    assert made
    if name in ALL_IN_C:
        assert None not in made


@pytest.mark.parametrize("layer", [nn.Tanh(), nn.Sigmoid(), nn.Dropout(0.3)])
@pytest.mark.parametrize("hidden", [3, 16, 37])
def test_layers_and_odd_sizes(layer: nn.Module, hidden: int) -> None:
    """Products whose sides are no whole vectors, in both precisions."""
    for dtype, slack in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(12, hidden), layer, nn.Linear(hidden, 5), nn.ReLU(), nn.Linear(5, 3))
        algorithm = fedge.FedAvg(model.to(dtype), epochs=1, batch_size=7, lr=0.2)
        plain, _ = trained(algorithm, problem(False), chunk=100)
        found, link = trained(algorithm, problem(False), chunk=100, compile=True)
        assert close(plain.params, found.params) < slack
        assert None not in programs(link)


def test_a_program_is_compiled_once(own_cache: Path) -> None:
    algorithm, federation = algorithms(False)["fedavg"], problem(False)
    first = programs(trained(algorithm, federation, compile=True)[1])
    files = sorted(own_cache.glob("*"))
    again = programs(trained(algorithm, federation, compile=True)[1])
    assert [one.fresh for one in first] == [True] * len(first)
    assert [one.fresh for one in again] == [False] * len(again)
    assert sorted(own_cache.glob("*")) == files


def test_a_program_that_errs_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(RULES, torch.ops.aten.relu.default, pointwise("{a}"))
    algorithm, federation = algorithms(False)["fedavg"], problem(False)
    with caplog.at_level(logging.INFO, "fedge"):
        found, link = trained(algorithm, federation, compile=True)
    assert set(programs(link)) == {None}
    assert "steps are not compiled: it gives other results" in caplog.text
    assert close(trained(algorithm, federation)[0].params, found.params) == 0


def test_a_step_without_a_rule_is_recorded_and_named(caplog: pytest.LogCaptureFixture) -> None:
    def wavy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(logits).sum(-1) * (y + 1)

    algorithm, federation = fedge.FedAvg(fedge.models.mlp(12, (7,), 3, seed=0), loss=wavy), problem(False)
    with caplog.at_level(logging.INFO, "fedge"):
        found, link = trained(algorithm, federation, compile=True)
    assert set(programs(link)) == {None}
    assert "has no form in C" in caplog.text
    assert close(trained(algorithm, federation)[0].params, found.params) == 0


def test_large_models_are_left_to_torch() -> None:
    model = fedge.models.mlp(12, (5000,), 3, seed=0)  # 80,003 numbers, in layers that are small
    _, link = trained(fedge.FedAvg(model, epochs=1), problem(False), chunk=100, compile=True)
    assert set(programs(link)) == {None}


def test_a_compiled_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    algorithm, federation = algorithms(False)["fedavg momentum"], problem(False)
    options: dict[str, Any] = {"cohort": 6, "seed": 5, "observe": fedge.Observe(checkpoint_every=1)}
    engine = fedge.Engine(compile=True)
    whole = fedge.train(algorithm, federation, rounds=4, engine=engine, **options)
    fedge.train(algorithm, federation, rounds=2, engine=engine, out=tmp_path / "run", **options)
    rest = fedge.train(algorithm, federation, rounds=4, out=tmp_path / "run", resume=True, **options)
    assert close(whole.params, rest.params) == 0


def test_long_runs_are_compiled_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, cnn = algorithms(False)["fedavg"], algorithms(True)["fedavg"]
    engine = fedge.Engine()
    assert engine.expecting(mlp, 1000).compile
    assert engine.expecting(mlp, 999) is engine
    assert not engine.expecting(cnn, 1000).compile
    assert not fedge.Engine(compile=False).expecting(mlp, 1000).compile
    monkeypatch.setattr(c_library, "compiler", _nothing)
    assert not engine.expecting(mlp, 1000).compile


def _nothing() -> tuple[str, str]:
    raise c_library.NoCompiler("no C compiler (cc) on this machine: install gcc, or leave compile out")


def test_a_missing_compiler_and_an_open_folder_are_named(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    own_cache.mkdir(parents=True)
    own_cache.chmod(0o777)
    with pytest.raises(c_library.NoCompiler, match="can be written by others: chmod 700 it"):
        c_library.folder()
    monkeypatch.setenv("CC", "no-such-compiler")
    c_library.compiler.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"no C compiler \(no-such-compiler\) on this machine: install gcc"):
            Simulator(algorithms(False)["fedavg"], problem(False), compile=True)
    finally:
        c_library.compiler.cache_clear()


def test_nan_is_passed_on() -> None:
    """relu and amax of NaN are NaN, as in torch: a client that diverged is seen."""
    federation, algorithm = problem(False), algorithms(False)["fedavg"]
    link = Simulator(algorithm, federation, compile=True)
    link.population.x[federation.examples(0)] = torch.nan
    clients = torch.arange(6)
    sent = {"params": dict(fedge.handle.parameters(algorithm.model))}
    replies, dropped = link.ask(fedge.core.At(0, 1, 0), (fedge.core.Ask(("train",), sent),), clients)
    assert [drop.client for drop in dropped] == [0]
    assert int(replies[0].clients) == 5
    assert None not in programs(link)


def test_operations_that_overwrite_are_known() -> None:
    """An operation of torch that writes into its first argument ends in an underscore."""
    written = {rule for rule in RULES if rule._schema.is_mutable}
    assert written == set(c_source.IN_PLACE)


def test_large_batches_are_left_to_torch() -> None:
    """Their intermediate arrays would not fit a thread's stack: a crash that nothing can catch."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(6000, 8, generator=generator), torch.randint(0, 3, (6000,), generator=generator)
    data = fedge.data.from_arrays(x, y, x[:50], y[:50])
    federation = fedge.Federation(data, fedge.partition.iid(data.train_y, clients=2, seed=0))
    algorithm = fedge.FedAvg(fedge.models.mlp(8, (128,), 3, seed=0), epochs=1, batch_size=3000, lr=0.1)
    link = Simulator(algorithm, federation, compile=True)
    run = fedge.train(algorithm, federation, rounds=2, link=link)
    assert run.rounds == 2
    assert programs(link) == [None]


def test_a_damaged_program_is_compiled_anew(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    text = "int run(void) { return 7; }"
    with monkeypatch.context() as broken:
        broken.setattr(c_library, "_compile", lambda path, text, library: library.write_bytes(b"\x7fELF"))
        with pytest.raises(c_library.NoCompiler, match="cannot be kept or loaded"):
            c_library.load(text)
    assert [file.stat().st_size for file in own_cache.glob("*.so")] == [4]
    run, fresh = c_library.load(text)
    assert (run(), fresh) == (7, True)
    assert c_library.load(text)[1] is False


@pytest.mark.parametrize("damage", [lambda raw: raw[: len(raw) // 2], lambda raw: raw + b"\0"], ids=["cut", "changed"])
def test_a_program_that_was_cut_short_is_not_loaded(
    damage: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    """Half of one loads, and ends the process when it is called: without a word, in every run from then on."""
    text = "int run(void) { return 8; }"
    c_library.load(text)
    (library,) = own_cache.glob("*.so")
    whole = library.read_bytes()
    library.unlink()  # this process has it in its memory
    library.write_bytes(damage(whole))
    loaded: list[bytes] = []
    monkeypatch.setattr(c_library.ctypes, "CDLL", lambda path: SimpleNamespace(run=loaded.append(library.read_bytes())))
    assert c_library.load(text)[1] is True
    assert [hashlib.sha256(one).hexdigest() for one in loaded] == [library.with_suffix(".sha256").read_text()]


def test_a_cache_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "fedge"):
        _, link = trained(algorithms(False)["fedavg"], problem(False), compile=True)
    assert set(programs(link)) == {None}
    assert "set XDG_CACHE_HOME" in caplog.text
