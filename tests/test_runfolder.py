"""The run folder: resuming equals never having stopped, and nothing is lost or overwritten."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedge
from fedge import toml
from fedge.core import Note
from fedge.engine import Simulator, TooFewReplies
from fedge.engine.clients.recall import WrongMemory
from fedge.experiment import ExperimentError, compare, parse
from fedge.experiment.planning import load_sweep
from fedge.runs import archive, atomic, checkpoint, experiments
from fedge.runs.differences import first_difference
from fedge.runs.examples import are_same, fingerprint
from fedge.runs.folder import RunFolder, RunFolderError
from fedge.sweep.kept import kept_runs
from fedge.sweep.whole import run_sweep
from tests.cases import EACH_PATH, algorithms, cases, close, ragged, toy_data

ALL = pytest.mark.all_cases


def go(out: Path, name: str = "fedavg_server_momentum", **options) -> fedge.Run:
    settings = {"rounds": 7, "cohort": 5, "seed": 3, "observe": fedge.Observe(checkpoint_every=3), **options}
    return fedge.train(algorithms()[name], ragged(toy_data()), out=out, **settings)


def records(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k != "seconds"} for record in lines]


def stop_after(phases: int):
    """A stop that says yes once so many phases are over."""
    seen = 0

    def stop() -> bool:
        nonlocal seen
        seen += 1
        return seen > phases

    return stop


def test_a_run_from_before_a_field_existed_goes_on(tmp_path: Path) -> None:
    go(tmp_path / "a", rounds=3)
    saved = tmp_path / "a" / "checkpoint.pt"
    content = checkpoint.load(saved)
    assert content["config"]["algorithm"].pop("clip") == "none"
    checkpoint.save(saved, content)
    assert close(go(tmp_path / "a", resume=True).params, go(tmp_path / "b").params) == 0
    algorithm = content["config"]["algorithm"]
    assert first_difference({"algorithm": algorithm}, {"algorithm": algorithm | {"clip": 1.0}}) == (
        "algorithm.clip", None, 1.0,
    )  # fmt: skip


def test_the_folder_holds_the_run(tmp_path: Path) -> None:
    run = go(tmp_path / "a")
    assert records(tmp_path / "a") == [{k: v for k, v in r.items() if k != "seconds"} for r in run.history]
    ledger = [json.loads(line) for line in (tmp_path / "a/ledger.jsonl").read_text().splitlines()]
    assert ledger == run.ledger.as_dicts()
    config = tomllib.loads((tmp_path / "a/config.toml").read_text())
    assert config["train"] == {
        "rounds": 7, "cohort": 5, "seed": 3, "evaluate_every": 1, "evaluate_train": False, "checkpoint_every": 3,
    }  # fmt: skip
    assert config["algorithm"]["server_momentum"] == 0.5
    summary = json.loads((tmp_path / "a/summary.json").read_text())
    assert summary["rounds"] == 7
    assert summary["final_accuracy"] == run.history[-1]["test_accuracy"]
    assert summary["up_bytes"] == sum(r["up_bytes"] for r in run.history)
    clients = json.loads((tmp_path / "a/clients.json").read_text())
    assert clients["labels"] == ragged(toy_data()).label_counts().tolist()


@pytest.mark.parametrize("name", cases(EACH_PATH))
def test_stopped_and_resumed_is_never_stopped(tmp_path: Path, name: str) -> None:
    whole = go(tmp_path / "whole", name)
    first = go(tmp_path / "parts", name, stop=stop_after(4))
    assert first.stopped
    assert not (tmp_path / "parts/summary.json").exists()
    rest = go(tmp_path / "parts", name, resume=True)
    assert not rest.stopped
    assert close(whole.params, rest.params) == 0
    assert records(tmp_path / "whole") == records(tmp_path / "parts")
    assert whole.ledger.rows == rest.ledger.rows
    assert (tmp_path / "whole/ledger.jsonl").read_text() == (tmp_path / "parts/ledger.jsonl").read_text()


def test_what_lies_beyond_the_checkpoint_is_cut_off(tmp_path: Path) -> None:
    whole = go(tmp_path / "whole")
    go(tmp_path / "a", rounds=3)
    lines = (tmp_path / "whole/rounds.jsonl").read_bytes().splitlines(keepends=True)
    with open(tmp_path / "a/rounds.jsonl", "ab") as file:
        file.write(lines[3] + lines[4][:20])  # a round after the checkpoint, and a torn line
    rest = go(tmp_path / "a", resume=True)
    assert records(tmp_path / "a") == records(tmp_path / "whole")
    assert close(whole.params, rest.params) == 0


def test_a_finished_run_is_not_repeated_and_may_be_prolonged(tmp_path: Path) -> None:
    go(tmp_path / "a", rounds=5)
    before = (tmp_path / "a/rounds.jsonl").read_bytes()
    assert go(tmp_path / "a", rounds=5, resume=True).rounds == 5
    assert (tmp_path / "a/rounds.jsonl").read_bytes() == before
    longer = go(tmp_path / "a", rounds=7, resume=True)
    assert close(longer.params, go(tmp_path / "b").params) == 0


def test_fewer_rounds_than_there_are_is_refused_and_more_are_written_down(tmp_path: Path) -> None:
    go(tmp_path / "a", rounds=5)
    with pytest.raises(RunFolderError, match="has 5 rounds already, 3 were asked for: ask for as many or more"):
        go(tmp_path / "a", rounds=3, resume=True)
    go(tmp_path / "a", rounds=6, resume=True)
    assert tomllib.loads((tmp_path / "a/config.toml").read_text())["train"]["rounds"] == 6


def test_a_run_that_fails_keeps_what_it_has(tmp_path: Path) -> None:
    """From round 4 on everything is NaN: the first three rounds are on disk, and the error says where it happened."""
    calls = 0

    def loss(logits, y):
        nonlocal calls
        calls += 1
        return fedge.cross_entropy(logits * (float("nan") if calls > 7 * 3 + 8 else 1.0), y)

    algorithm = fedge.FedAvg(algorithms()["fedavg"].model, epochs=1, batch_size=None, loss=loss)
    federation = ragged(toy_data())
    link = fedge.engine.Loopback(algorithm, federation)
    with pytest.raises(fedge.engine.TooFewReplies, match=r"round \d: task 'train' has good uploads of 0 clients"):
        fedge.train(
            algorithm, federation, rounds=9, out=tmp_path / "a", observe=fedge.Observe(checkpoint_every=100), link=link
        )
    done = checkpoint.load(tmp_path / "a/checkpoint.pt")["round"]
    assert done == len(records(tmp_path / "a")) >= 1
    assert not (tmp_path / "a/summary.json").exists()


def test_another_network_of_the_same_size_is_refused_and_the_chunk_is_kept(tmp_path: Path) -> None:
    def train(activation: type[torch.nn.Module], **options) -> fedge.Run:
        layers = [torch.nn.Linear(6, 4), activation(), torch.nn.Linear(4, 3)]
        algorithm = fedge.FedAvg(torch.nn.Sequential(*layers).double(), epochs=1)
        federation = ragged(toy_data())
        link = fedge.engine.Simulator(algorithm, federation, chunk=options.pop("chunk", None))
        fedge.train(algorithm, federation, seed=0, out=tmp_path / "a", link=link, **options)
        return link

    train(torch.nn.ReLU, rounds=2, chunk=3)
    with pytest.raises(RunFolderError, match=r"algorithm.model = .*checksum"):
        train(torch.nn.Tanh, rounds=3, resume=True)
    assert train(torch.nn.ReLU, rounds=3, resume=True).chunk == 3


def test_what_is_not_finite_is_null_in_the_files(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append([{"round": 1, "test_loss": math.nan, "test_class_accuracy": [1.0, math.inf]}], [])
    folder.finish({"final_loss": -math.inf})
    for name in ("rounds.jsonl", "summary.json"):
        record = json.loads(
            (tmp_path / name).read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON")
        )
        assert None in record.values() or None in record["test_class_accuracy"]


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(RunFolderError, match="is a file: choose a folder"):
        go(tmp_path / "a")


def test_a_run_ended_before_its_first_checkpoint_starts_over(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/rounds.jsonl").touch()
    assert close(go(tmp_path / "a", resume=True).params, go(tmp_path / "b").params) == 0


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="there is no run to resume at"):
        go(tmp_path / "none", resume=True)
    with pytest.raises(RunFolderError, match="resume needs the run folder"):
        fedge.train(algorithms()["fedavg"], ragged(toy_data()), rounds=1, resume=True)
    go(tmp_path / "a", rounds=4)
    with pytest.raises(RunFolderError, match="already holds a run: resume it, or choose another"):
        go(tmp_path / "a")
    with pytest.raises(RunFolderError, match=r"train.seed = 3, now it is 4"):
        go(tmp_path / "a", resume=True, seed=4)
    with pytest.raises(RunFolderError, match="its clients held other examples than these"):
        fedge.train(
            algorithms()["fedavg_server_momentum"], ragged(toy_data(), (17, 3, 8, 1, 24, 9, 28)),
            rounds=7, cohort=5, seed=3, observe=fedge.Observe(checkpoint_every=3), out=tmp_path / "a", resume=True,
        )  # fmt: skip
    with pytest.raises(RunFolderError, match=r"algorithm.lr = 0.1, now it is 0.2"):
        go(tmp_path / "a", "fedavg", resume=True)


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    go(tmp_path / "a", rounds=4)
    path = tmp_path / "a/checkpoint.pt"
    good = path.read_bytes()
    path.write_bytes(good[:-7])
    with pytest.raises(RunFolderError, match="is damaged: its checksum does not match"):
        go(tmp_path / "a", resume=True)
    torch.save({"weights": torch.ones(3)}, path)
    with pytest.raises(RunFolderError, match="is not a checkpoint of this version of fedge"):
        go(tmp_path / "a", resume=True)
    path.write_bytes(good)
    (tmp_path / "a/rounds.jsonl").write_text("")
    with pytest.raises(RunFolderError, match=r"rounds\.jsonl has 0 of the 4 lines that were written"):
        go(tmp_path / "a", resume=True)
    path.unlink()
    (tmp_path / "a/rounds.jsonl").write_text("{}\n")
    with pytest.raises(RunFolderError, match="there is no checkpoint"):
        go(tmp_path / "a", resume=True)


def flipped(path: Path, line: int, at: int, bit: int) -> None:
    lines = path.read_bytes().split(b"\n")
    text = bytearray(lines[line])
    text[at % len(text)] ^= 1 << bit
    lines[line] = bytes(text)
    path.write_bytes(b"\n".join(lines))


@pytest.mark.parametrize("name", ["rounds.jsonl", "ledger.jsonl"])
def test_a_flipped_bit_is_named_by_its_line(tmp_path: Path, name: str) -> None:
    go(tmp_path / "a", "feddane", rounds=3)
    path, draw = tmp_path / "a" / name, torch.Generator().manual_seed(0)
    good = path.read_bytes()
    for line in range(good.count(b"\n")):
        for bit in range(8):
            at = int(torch.randint(10_000, (), generator=draw))
            flipped(path, line, at, bit)
            with pytest.raises(RunFolderError, match=rf"line {line + 1} of {name} is not what was written there"):
                go(tmp_path / "a", "feddane", resume=True)
            path.write_bytes(good)
    assert close(go(tmp_path / "a", "feddane", resume=True).params, go(tmp_path / "b", "feddane").params) == 0


@pytest.mark.parametrize("keep", [0, 1, 5])
def test_a_shortened_ledger_is_not_resumed_with_wrong_bytes(tmp_path: Path, keep: int) -> None:
    go(tmp_path / "a", rounds=7)
    path = tmp_path / "a/ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:keep]))
    with pytest.raises(RunFolderError, match=rf"ledger\.jsonl has {keep} of the 7 lines .*: restore it from a copy"):
        go(tmp_path / "a", rounds=9, resume=True)
    assert path.read_bytes().count(b"\n") == keep  # nothing was touched
    assert (tmp_path / "a/summary.json").exists()


def without_checksums(out: Path) -> None:
    """As runs were saved before there were checksums of lines."""
    content = checkpoint.load(out / "checkpoint.pt")
    del content["lines"]
    checkpoint.save(out / "checkpoint.pt", content)


def test_a_run_from_before_checksums_goes_on_and_its_bytes_are_compared(tmp_path: Path) -> None:
    go(tmp_path / "a", rounds=5, stop=stop_after(5))
    without_checksums(tmp_path / "a")
    ledger, rounds = tmp_path / "a/ledger.jsonl", tmp_path / "a/rounds.jsonl"
    good = ledger.read_bytes()
    ledger.write_bytes(good.replace(b'"up": 2140', b'"up": 2141', 1))
    assert ledger.read_bytes() != good
    with pytest.raises(RunFolderError, match=r"round 1 has \d+ bytes up in rounds\.jsonl, but \d+ in ledger\.jsonl"):
        go(tmp_path / "a", resume=True)
    ledger.write_bytes(good.replace(b"}", b"", 1))
    with pytest.raises(RunFolderError, match=r"line 1 of ledger\.jsonl is not the object of a round"):
        go(tmp_path / "a", resume=True)
    ledger.write_bytes(good)
    with open(rounds, "ab") as file:
        file.write(b'{"round": 6, "coh')  # torn by a kill
    assert close(go(tmp_path / "a", resume=True).params, go(tmp_path / "b").params) == 0
    assert records(tmp_path / "a") == records(tmp_path / "b")
    ledger.write_bytes(b"")
    with pytest.raises(RunFolderError, match=r"ledger\.jsonl has 0 of the 7 lines"):  # it has checksums now
        go(tmp_path / "a", rounds=9, resume=True)


WRONG = {
    "round": [None, "6", -1, 2.5, True, 2**31, 10**30],
    "config": [None, [], "x"],
    "engine": [None, 3],
    "clients": [[], 7],
    "lines": [None, [], {"rounds.jsonl": [1, 2]}, {"rounds.jsonl": torch.ones(3)}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_checkpoint_with_wrong_parts_is_one_line(tmp_path: Path, name: str, value: object) -> None:
    go(tmp_path / "a", rounds=3)
    path = tmp_path / "a/checkpoint.pt"
    checkpoint.save(path, checkpoint.load(path) | {name: value})
    with pytest.raises(RunFolderError, match=r"^cannot resume.*damaged"):
        go(tmp_path / "a", resume=True)


def test_a_folder_that_cannot_be_made_is_an_error_before_any_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot write to .*file"):
        go(tmp_path / "file" / "run", on_round=lambda record: pytest.fail("trained"))


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(tmp_path: Path, monkeypatch) -> None:
    go(tmp_path / "a", rounds=3)
    good = (tmp_path / "a/checkpoint.pt").read_bytes()

    def full(path: Path, content: bytes) -> None:
        if path.name == "checkpoint.pt":
            raise OSError(28, "No space left on device", str(path))
        checkpoint_write(path, content)

    checkpoint_write = atomic.write_atomically
    monkeypatch.setattr(atomic, "write_atomically", full)
    with pytest.raises(RunFolderError, match=r"No space left on device; make room.*last checkpoint holds is intact"):
        go(tmp_path / "a", resume=True)
    assert (tmp_path / "a/checkpoint.pt").read_bytes() == good


SCRIPT = """
import sys
from tests.test_runfolder import go
from pathlib import Path
from fedge import Observe
out = Path(sys.argv[1])
go(out, sys.argv[2], rounds=40, observe=Observe(checkpoint_every=2), resume=out.exists())
"""


@pytest.mark.parametrize(
    "name", ["scaffold", *(pytest.param(n, marks=ALL) for n in ("fedavg_server_momentum", "compressed_fedova"))]
)
def test_kill_minus_nine_and_resume(name: str, tmp_path: Path) -> None:
    """Three kills at different moments; benchmarks/kill_and_resume.py does twenty at random."""
    whole = go(tmp_path / "whole", name, rounds=40, observe=fedge.Observe(checkpoint_every=2))
    out = tmp_path / "killed"
    for wanted in (3, 11, 26):
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(out), name], cwd=Path(__file__).parent.parent)
        while process.poll() is None:
            if (out / "rounds.jsonl").exists() and (out / "rounds.jsonl").read_bytes().count(b"\n") >= wanted:
                os.kill(process.pid, signal.SIGKILL)
                break
            time.sleep(0.002)
        assert process.wait() == -signal.SIGKILL
    done = go(out, name, rounds=40, observe=fedge.Observe(checkpoint_every=2), resume=True)
    assert done.memory_bytes == whole.memory_bytes
    assert close(whole.params, done.params) == 0
    assert records(out) == records(tmp_path / "whole")


def test_save_is_atomic(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "x"
    checkpoint.save(path, {"a": 1})

    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="Input/output"):
        checkpoint.save(path, {"a": 2})
    assert checkpoint.load(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


plain = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
tables = st.recursive(
    st.dictionaries(st.text(max_size=5), plain, max_size=3),
    lambda inner: st.dictionaries(st.text(max_size=5), inner | st.lists(inner, min_size=1, max_size=2), max_size=3),
    max_leaves=5,
)


@given(tables)
def test_toml_reads_back_what_was_written(config: dict) -> None:
    assert tomllib.loads(toml.dump(config)) == config


def test_first_difference() -> None:
    assert first_difference({"a": {"b": 1}}, {"a": {"b": 1}}) is None
    assert first_difference({"a": {"b": 1}}, {"a": {"b": 2}}) == ("a.b", 1, 2)
    assert first_difference({"a": 1}, {"a": 1, "c": 3}) == ("c", None, 3)
    assert first_difference({"train": {"rounds": 1}}, {"train": {"rounds": 2}}) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["state"].update(params=7),
        lambda content: content["state"].update(params={}),
        lambda content: content["state"]["params"].update({next(iter(content["state"]["params"])): torch.ones(2)}),
        lambda content: content.update(state="x"),
        lambda content: content.update(state=None),
        lambda content: content.update(engine={}),
        lambda content: content["engine"].update(threads="many"),
        lambda content: content["engine"].update(threads=10**30),
        lambda content: content["engine"].update(pad=[0]),
        lambda content: content.update(clients={"x": 3}),
        lambda content: content.update(clients={"x": {"jobs": torch.zeros(3, 2), "leaves": {}}}),
        lambda content: content.update(clients={"x": {"jobs": torch.zeros(3, 2).long(), "leaves": {"a": None}}}),
        lambda content: content["state"].update(
            params={name: leaf.half() for name, leaf in content["state"]["params"].items()}
        ),
    ],
)
def test_a_checkpoint_with_parts_of_another_kind_is_one_line(tmp_path: Path, change) -> None:
    go(tmp_path / "a", rounds=3)
    path = tmp_path / "a/checkpoint.pt"
    content = checkpoint.load(path)
    change(content)
    checkpoint.save(path, content)
    with pytest.raises(RunFolderError, match=r"^cannot resume.*damaged"):
        go(tmp_path / "a", resume=True)


def test_more_threads_than_the_machine_has_are_not_started(tmp_path: Path) -> None:
    """The run may come from a larger machine; 10**9 of them ended the process."""
    go(tmp_path / "a", rounds=3)
    path = tmp_path / "a/checkpoint.pt"
    content = checkpoint.load(path)
    content["engine"]["threads"] = 10**9
    checkpoint.save(path, content)
    assert go(tmp_path / "a", resume=True).rounds == 7
    most = max(os.cpu_count() or 1, torch.get_num_threads())
    assert checkpoint.load(path)["engine"]["threads"] <= most


@pytest.mark.parametrize(
    "change",
    [
        lambda leaves: leaves.update(x=next(iter(leaves.values()))),
        lambda leaves: leaves.pop(next(iter(leaves))),
        lambda leaves: leaves.update({name: leaf.half() for name, leaf in leaves.items()}),
        lambda leaves: leaves.update({name: leaf[..., :1] for name, leaf in leaves.items()}),
    ],
)
def test_what_clients_remember_in_a_checkpoint_is_what_the_task_remembers(tmp_path: Path, change) -> None:
    go(tmp_path / "a", "scaffold", rounds=3, cohort=None)
    path = tmp_path / "a/checkpoint.pt"
    content = checkpoint.load(path)
    change(content["clients"]["own_control"]["leaves"])
    checkpoint.save(path, content)
    with pytest.raises(WrongMemory, match="what clients remember as 'own_control' has other names, shapes or types"):
        go(tmp_path / "a", "scaffold", cohort=None, resume=True)


@pytest.mark.parametrize(
    "line",
    [b"\xe3\x01", b"[" * 100_000, b"1" * 5000, b"{}", b'{"round": "x"}', b'{"round": 1, "up_bytes": []}', b"null"],
)
def test_damaged_lines_do_not_stop_a_look_at_a_run(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "rounds.jsonl").write_bytes(line + b'\n{"round": 2, "up_bytes": 1, "down_bytes": 1}\n{"torn')
    assert [record["round"] for record in experiments.records(tmp_path)] == [2]


# The last checkpoint that was of use


def lying(from_round: int, federation: fedge.Federation, algorithm: fedge.FedAvg) -> fedge.engine.Simulator:
    """From this round on client 2 sends 900 times what the others do, one way or the other: within the limits."""

    class Liar(fedge.engine.Simulator):
        def open(self, at, asks):
            self.round = at.round
            super().open(at, asks)

        def received(self, jobs, uploads):
            lies = jobs.clients == 2
            for upload, _ in uploads.values() if self.round >= from_round else ():
                leaves = upload["delta"].values()
                usual = torch.stack([leaf[~lies].flatten(1).abs().amax(1) for leaf in leaves]).amax(0).median()
                for leaf in leaves:
                    signs = torch.arange(leaf[0].numel()).mul(self.round).sin().sign().view(leaf[0].shape)
                    leaf[lies] = 900 * usual * signs
            return uploads

    return Liar(algorithm, federation)


@pytest.mark.parametrize(("every", "checkpoints"), [(1, 1), (1, 2), (3, 1), (2, 3)])
def test_a_run_that_lies_have_spoilt_goes_on_from_its_last_good_checkpoint(
    every: int, checkpoints: int, tmp_path: Path
) -> None:
    federation = ragged(toy_data())
    algorithm = fedge.FedAvg(fedge.models.mlp(6, (12,), 3, seed=1), lr=0.3, epochs=2, batch_size=4)
    observe = fedge.Observe(evaluate_every=every, checkpoint_every=checkpoints)
    out, link = tmp_path / "run", lying(7, federation, algorithm)
    run = fedge.train(algorithm, federation, rounds=13, out=out, observe=observe, link=link)
    assert re.search(
        r"of use is that of round [3-6]: move .*good\.pt to .*checkpoint\.pt and resume", run.diverged or ""
    )
    good, spoilt = (checkpoint.load(out / name) for name in ("good.pt", "checkpoint.pt"))
    assert 3 <= good["round"] <= 6 < spoilt["round"]
    (out / "good.pt").replace(out / "checkpoint.pt")
    rest = fedge.train(algorithm, federation, rounds=12, out=out, observe=observe, resume=True)
    plain = fedge.train(algorithm, federation, rounds=12, observe=observe)
    assert close(rest.params, plain.params) == 0
    assert len(records(out)) == 12
    assert not (out / "good.pt").exists()  # the newest checkpoint is as good


def one_lie(part: str, times: float, federation: fedge.Federation, algorithm: fedge.core.Algorithm) -> Simulator:
    """In round 4 client 2 tells the truth about the model, and of this part sends a multiple of the largest number."""

    class Liar(Simulator):
        def open(self, at, asks):
            self.round = at.round
            super().open(at, asks)

        def received(self, jobs, uploads):
            lies = jobs.clients == 2
            for upload, _ in uploads.values() if self.round == 4 else ():
                for leaf in upload[part].values():
                    leaf[lies] = times * leaf[~lies].abs().max()
            return uploads

    return Liar(algorithm, federation)


@pytest.mark.parametrize("times", [900.0, 1e30])
def test_a_lie_beside_the_model_is_not_in_the_last_good_checkpoint(times: float, tmp_path: Path) -> None:
    """It shows one round later, when the model that came with it was found sound already; the larger as no numbers."""
    federation = ragged(toy_data())
    algorithm = fedge.SCAFFOLD(fedge.models.mlp(6, (12,), 3, seed=1), lr=0.3, epochs=5, batch_size=4)
    out, observe = tmp_path / "run", fedge.Observe(checkpoint_every=1)
    link = one_lie("change", times, federation, algorithm)
    link.max_ratio = link.max_ratio if times < 1000 else None
    try:
        told = fedge.train(algorithm, federation, rounds=10, out=out, observe=observe, link=link).way_back
    except TooFewReplies as error:
        told = str(error)
    assert records(out)[3]["test_accuracy"] > 0.6
    assert "of use is that of round 3: move" in told
    (out / "good.pt").replace(out / "checkpoint.pt")
    rest = fedge.train(algorithm, federation, rounds=6, out=out, observe=observe, resume=True)
    assert close(rest.params, fedge.train(algorithm, federation, rounds=6).params) == 0


def test_a_run_that_ends_spoilt_and_has_not_diverged_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation = ragged(toy_data())
    algorithm = fedge.FedAvg(fedge.models.mlp(6, (12,), 3, seed=1), lr=0.3, epochs=2, batch_size=4)
    out, link = tmp_path / "run", one_lie("delta", -300.0, federation, algorithm)
    run = fedge.train(algorithm, federation, rounds=4, out=out, observe=fedge.Observe(checkpoint_every=1), link=link)
    assert run.diverged is None
    assert run.history[3]["test_loss"] > 10 * run.history[0]["test_loss"]
    assert "the run ends far from its best" in caplog.text
    assert "of use is that of round 2: move" in caplog.text


def test_a_proven_checkpoint_stays_when_a_killed_run_goes_on(tmp_path: Path) -> None:
    """Of the newest checkpoint nothing is known yet: it does not take the place of the one before it."""
    federation = ragged(toy_data())
    algorithm = fedge.SCAFFOLD(fedge.models.mlp(6, (12,), 3, seed=1), lr=0.3, epochs=5, batch_size=4)
    out, observe = tmp_path / "run", fedge.Observe(checkpoint_every=1)

    def killed(record: dict) -> None:
        if record["round"] == 4:
            raise KeyboardInterrupt

    link = one_lie("change", 900.0, federation, algorithm)
    with pytest.raises(KeyboardInterrupt):
        fedge.train(algorithm, federation, rounds=9, out=out, observe=observe, link=link, on_round=killed)
    assert [checkpoint.load(out / name)["round"] for name in ("good.pt", "checkpoint.pt")] == [3, 4]
    fedge.train(algorithm, federation, rounds=9, out=out, observe=observe, resume=True)
    assert checkpoint.load(out / "good.pt")["round"] == 3


def test_an_honest_run_leaves_one_checkpoint(tmp_path: Path) -> None:
    go(tmp_path / "a", rounds=4)
    assert not (tmp_path / "a/good.pt").exists()


def keeping(what: object) -> fedge.FedAvg:
    """FedAvg with something of one's own in its state."""

    class Mine(fedge.FedAvg):
        def init(self, params):
            return {**super().init(params), "mine": what}

        def round(self, state):
            inner = yield from super().round({name: part for name, part in state.items() if name != "mine"})
            return {**inner, "mine": what}

    return Mine(algorithms()["fedavg"].model, lr=0.1, epochs=1)


class Pair(NamedTuple):
    one: int
    two: float


def _deep() -> list:
    nest: list = []
    for _ in range(120):
        nest = [nest]
    return nest


UNKEPT = {
    "named tuple": (
        lambda: [Pair(1, 2.0)],
        r"state\['mine'\]\[0\] is a .*Pair, which cannot be read",
    ),
    "array": (
        lambda: {"a": np.zeros(3)},
        r"state\['mine'\]\['a'\] is a numpy.ndarray, .* numbers and None",
    ),
    "narrow number": (lambda: np.float32(0.1), r"state\['mine'\] is a numpy.float32"),
    "key": (lambda: {Pair(1, 2.0): 1}, r"a key of state\['mine'\] is a .*Pair"),
    "sparse": (lambda: torch.eye(3).to_sparse(), r"state\['mine'\] is a tensor of kind torch.sparse_coo on cpu"),
    "deep": (_deep, "a checkpoint has at most 5000000 parts, 100 deep, and state"),
}


@pytest.mark.parametrize("kind", UNKEPT)
def test_a_state_that_no_checkpoint_gives_back_is_refused_before_the_first_round(tmp_path: Path, kind: str) -> None:
    make, words = UNKEPT[kind]
    with pytest.raises(checkpoint.CheckpointError, match=words):
        fedge.train(keeping(make()), ragged(toy_data()), rounds=1, out=tmp_path / "a")
    assert not (tmp_path / "a/checkpoint.pt").exists()


def test_numbers_of_numpy_and_numbers_that_stand_for_many_are_kept(tmp_path: Path) -> None:
    mine = [np.float64(0.5), np.int64(3), np.bool_(True), {np.int64(2): (1.5, None)}, OrderedDict(a="b")]
    algorithm, many = keeping([*mine, torch.ones(()).expand(5_000_000)]), {"out": tmp_path / "a"}
    observe = fedge.Observe(checkpoint_every=1, keep="best")
    fedge.train(algorithm, ragged(toy_data()), rounds=1, observe=observe, **many)
    for name in ("checkpoint.pt", "best.pt"):
        *found, ones = checkpoint.load(tmp_path / "a" / name)["state"]["mine"]
        assert found == mine
        assert [type(one) for one in found] == [float, int, bool, dict, OrderedDict]
        assert ones.shape == (5_000_000,)
        assert float(ones.sum()) == 5_000_000
    assert fedge.train(algorithm, ragged(toy_data()), rounds=2, observe=observe, resume=True, **many).rounds == 2


def noting(notes: dict, by_flow: bool = False) -> fedge.FedAvg:
    """FedAvg with notes of one's own, yielded or in `notes`."""

    class Mine(fedge.FedAvg):
        def round(self, state):
            for name, value in notes.items() if by_flow else ():
                yield Note(name, value)
            return (yield from super().round(state))

        def notes(self, state):
            return {} if by_flow else notes

    return Mine(algorithms()["fedavg"].model, lr=0.1, epochs=1)


@pytest.mark.parametrize("by_flow", [False, True])
@pytest.mark.parametrize("name", ["round", "up_bytes", "dropped", "skipped", "joules", "test_loss", "train_accuracy"])
def test_a_note_that_is_called_like_a_field_of_the_record_is_refused(name: str, by_flow: bool) -> None:
    with pytest.raises(ValueError, match=f"the note '{name}' is a field of the record .*: rename it"):
        fedge.train(noting({name: 0}, by_flow), ragged(toy_data()), rounds=1)


@pytest.mark.parametrize("value", [{1, 2}, b"a", 1j, {(1, 2): 3}, torch.zeros(2), np.zeros((2, 1))])
def test_a_note_that_is_no_json_is_refused_by_its_name(value: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the note 'mine' cannot be written \(.*\): note numbers, strings") as refused:
        fedge.train(noting({"fine": 1, "mine": [value]}), ragged(toy_data()), rounds=1, out=tmp_path / "a")
    assert "\n" not in str(refused.value)


def test_single_numbers_in_notes_become_numbers(tmp_path: Path) -> None:
    single = (np.float32(0.5), np.int64(2), torch.tensor(0.5), torch.ones(1, dtype=torch.long), math.nan)
    run = fedge.train(noting({"mine": single}), ragged(toy_data()), rounds=1, out=tmp_path / "a")
    assert run.history[0]["mine"][:4] == (0.5, 2, 0.5, 1)
    assert records(tmp_path / "a")[0]["mine"] == [0.5, 2, 0.5, 1, None]


class Shell:
    """A pickle that would write a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path, str]]:
        return (Path.write_text, (self.path, "read"))


@pytest.mark.parametrize("content", ["object", "list"])
def test_a_crafted_checkpoint_runs_nothing_and_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    """Its checksum is right, as an attacker's would be."""
    path, trace = tmp_path / "checkpoint.pt", tmp_path / "trace"
    checkpoint.save(path, {"state": Shell(trace)} if content == "object" else [1])  # type: ignore[arg-type]
    with pytest.raises(checkpoint.CheckpointError, match="checkpoint") as refused:
        checkpoint.load(path)
    assert "\n" not in str(refused.value)
    assert not trace.exists()


def _laughs() -> list:
    nest: list = [0]
    for _ in range(60):
        nest = [nest, nest]
    return nest


ENDLESS = {
    "lists in lists": (_laughs, "holds more than 5000000 parts"),
    "one number for 8 TB": (lambda: torch.zeros(1).double().expand(10**12), "a tensor that no checkpoint holds"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "a tensor that no checkpoint holds"),
    "no numbers": (lambda: torch.empty(3, device="meta"), "a tensor that no checkpoint holds"),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_small_checkpoint_that_is_large_to_look_at_is_refused(tmp_path: Path, kind: str) -> None:
    make, words = ENDLESS[kind]
    go(tmp_path / "a", rounds=2)
    path = tmp_path / "a/checkpoint.pt"
    content = checkpoint.load(path)
    content["state"]["more"] = make()
    checkpoint.save(path, content)
    assert path.stat().st_size < 100_000
    with pytest.raises(RunFolderError, match=words) as refused:
        go(tmp_path / "a", resume=True)
    assert "\n" not in str(refused.value)


ENDS = archive.END64.size + archive.LOCATOR.size + archive.END.size


def _laid_out(records: bytes, directory: bytes, entries: int, place: int | None = None) -> bytes:
    """An archive with ends as torch writes them; `place` is where they say that the directory is."""
    at = len(records) if place is None else place
    numbers = (entries, entries, len(directory), at)
    long = archive.END64.pack(b"PK\6\6", archive.END64.size - 12, 0x31E, 45, 0, 0, *numbers)
    locator = archive.LOCATOR.pack(b"PK\6\7", 0, len(records + directory), 1)
    return records + directory + long + locator + archive.END.pack(b"PK\5\6", 0, 0, *numbers, 0)


def _zipped(body: bytes) -> bytes:
    found = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(body)) as plain, zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    return found.getvalue()


class Named(str):
    """A storage by the name under which a checkpoint asks for it."""


class Asking(pickle.Pickler):
    def persistent_id(self, name: object) -> tuple | None:
        return ("storage", torch.ByteStorage, str(name), "cpu", 1 << 20) if isinstance(name, Named) else None


def _asks_for(names: Iterable[str], record: str) -> bytes:
    """An archive with one record of 1 MB, and a pickle that asks for it by these names."""
    found, asked = io.BytesIO(), io.BytesIO()
    Asking(asked, 2).dump({"state": list(map(Named, names))})
    writer = torch._C.PyTorchFileWriter(found)
    writer.write_record("data.pkl", asked.getvalue(), len(asked.getvalue()))
    writer.write_record(f"data/{record}", bytes(1 << 20), 1 << 20)
    writer.write_end_of_file()
    return found.getvalue()


def _crafted(how: str) -> bytes:
    found = io.BytesIO()
    torch.save({"state": torch.zeros(1 << 20)}, found)
    body = found.getvalue()
    entries, _, size, place = archive.END64.unpack_from(body, len(body) - ENDS)[-4:]
    records, directory = body[:place], body[place : place + size]
    assert _laid_out(records, directory, entries)[place:] == body[place:]
    if how == "zipped":
        return _zipped(body)
    if how == "packed":
        return _laid_out(records, re.sub(b"(?s)(PK\1\2.{6})\0", lambda it: it[1] + b"\x08", directory), entries)
    if how == "two directories":  # torch reads the first one, zipfile the one before the ends
        return _laid_out(records + directory, directory, entries, place)
    if how == "an entry twice":
        return _laid_out(records, directory * 2, 2 * entries)
    if how == "another record":
        return _laid_out(records, directory.replace(b"version", b"data/00"), entries)
    if how == "capitals":
        return _asks_for(map("".join, itertools.product("aA", repeat=6)), "aaaaaa")
    return _asks_for((f"0\0{number}" for number in range(64)), "0")


CRAFTED = {
    "zipped": "ends of another kind",
    "packed": "a compressed file",
    "two directories": "two directories",
    "an entry twice": "a record under many names",
    "another record": "an entry without its record",
    "capitals": "a record under many names",
    "names with an end": "a record under many names",
}


@pytest.mark.parametrize("how", CRAFTED)
def test_a_checkpoint_takes_no_more_memory_than_its_file(how: str, tmp_path: Path) -> None:
    path, body = tmp_path / "checkpoint.pt", _crafted(how)
    body = body[:-2] + checkpoint.COMMENT.to_bytes(2, "little")
    path.write_bytes(body + checkpoint.MAGIC + checkpoint._sum(body))
    with pytest.raises(checkpoint.CheckpointError, match=rf"checkpoint\.pt holds what no .* \({CRAFTED[how]}\)"):
        checkpoint.load(path)


def test_torch_lays_out_archives_as_they_are_read(tmp_path: Path) -> None:
    content = {"many": [torch.full((n % 7,), n) for n in range(2000)], "empty": {}, "one": torch.ones(300, 300)}
    checkpoint.save(tmp_path / "a", content)
    found = checkpoint.load(tmp_path / "a")
    assert all(map(torch.equal, found["many"], content["many"]))
    assert torch.equal(found["one"], content["one"])


@pytest.mark.parametrize("name", ["checkpoint.pt", "rounds.jsonl", "ledger.jsonl"])
def test_a_folder_in_the_place_of_a_file_is_one_line(tmp_path: Path, name: str) -> None:
    go(tmp_path / "a", rounds=2)
    (tmp_path / "a" / name).unlink()
    (tmp_path / "a" / name).mkdir()
    with pytest.raises(RunFolderError, match="cannot be read: Is a directory"):
        go(tmp_path / "a", resume=True)


def test_checksums_of_other_files_are_damage(tmp_path: Path) -> None:
    go(tmp_path / "a", rounds=2)
    content = checkpoint.load(tmp_path / "a/checkpoint.pt")
    checkpoint.save(tmp_path / "a/checkpoint.pt", content | {"lines": {"x": torch.zeros(1, dtype=torch.int32)}})
    with pytest.raises(RunFolderError, match="no checksums of lines: it is damaged"):
        go(tmp_path / "a", resume=True)


def test_a_run_from_before_its_examples_were_looked_at_goes_on(tmp_path: Path) -> None:
    whole = go(tmp_path / "whole")
    go(tmp_path / "a", rounds=3)
    content = checkpoint.load(tmp_path / "a/checkpoint.pt")
    del content["examples"]
    checkpoint.save(tmp_path / "a/checkpoint.pt", content)
    close(whole.params, go(tmp_path / "a", resume=True).params)
    assert checkpoint.load(tmp_path / "a/checkpoint.pt")["examples"].shape == (6, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_fingerprint_tells_examples_apart_but_for_rounding(dtype: torch.dtype) -> None:
    x = torch.randn(5000, 3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    labels = torch.arange(5000) % 4

    def of(x: torch.Tensor, y: torch.Tensor = labels, test: torch.Tensor = x[:9], first: int = 0) -> torch.Tensor:
        data = fedge.data.Data(x, y, test, y[:9], 4)
        return fingerprint(fedge.Federation(data, [range(first, 2000), range(2000, 5000)]))

    one, turned, swapped = x.clone(), labels.clone(), x.clone()
    one[4321, 2, 1] += 0.5
    turned[17] = 3
    swapped[[5, 4200]] = x[[4200, 5]]
    assert are_same(of(x), of(x.clone()))
    assert are_same(of(x), of(x * (1 + 1e-7)))
    for other in (of(one), of(swapped), of(2 * x), of(x, turned), of(x, test=x[1:10]), of(x, first=1)):
        assert not are_same(of(x), other)
    huge = x.double() * 1e200
    assert are_same(of(huge, test=huge[:9]), of(huge, test=huge[:9]))


# -- a folder from somebody else: links in it lead to the user's own files


@pytest.mark.parametrize(
    ("name", "begun"), [(".checkpoint.pt.tmp", True), ("rounds.jsonl", False), ("ledger.jsonl", False)]
)
def test_nothing_is_written_through_a_link_in_a_run_folder(name: str, begun: bool, tmp_path: Path) -> None:
    """The name of the temporary file is known; what a run adds to is changed where it lies."""
    precious, run = tmp_path / "precious", tmp_path / "a"
    if begun:
        go(run, rounds=2)
    precious.write_text("mine" if begun or name == "ledger.jsonl" else "")
    run.mkdir(exist_ok=True)
    (run / name).symlink_to(precious)
    before = precious.read_text()
    if begun:
        assert go(run, rounds=4, resume=True).rounds == 4
        assert not list(run.glob(".*.tmp"))
    else:
        with pytest.raises(RunFolderError, match=rf"cannot write to .*{name}: it is a link, and nothing is written"):
            go(run, rounds=2, resume=True)
    assert precious.read_text() == before


def test_a_link_in_the_place_of_lines_that_a_checkpoint_knows_is_replaced(tmp_path: Path) -> None:
    go(tmp_path / "a", rounds=2)
    for name in ("rounds.jsonl", "ledger.jsonl"):
        (tmp_path / "a" / name).rename(tmp_path / name)
        (tmp_path / "a" / name).symlink_to(tmp_path / name)
    before = (tmp_path / "rounds.jsonl").read_bytes()
    go(tmp_path / "a", rounds=4, resume=True)
    assert (tmp_path / "rounds.jsonl").read_bytes() == before
    assert len(records(tmp_path / "a")) == 4


@pytest.mark.parametrize("what", ["pipe", "device"])
@pytest.mark.parametrize("name", ["checkpoint.pt", "rounds.jsonl", "ledger.jsonl", ".lock", "best.pt"])
def test_what_is_no_file_in_a_run_folder_is_named_and_not_waited_for(name: str, what: str, tmp_path: Path) -> None:
    """Reading a pipe waits for somebody to write into it, /dev/zero takes all memory."""
    go(tmp_path / "a", rounds=2, observe=fedge.Observe(keep="best"))
    _no_file(tmp_path / "a" / name, what)
    if name == "best.pt":  # is not needed to go on
        assert go(tmp_path / "a", rounds=4, resume=True, observe=fedge.Observe(keep="best")).rounds == 4
        return
    with pytest.raises(RunFolderError, match=r"a pipe or a device|it is a link"):
        go(tmp_path / "a", rounds=4, resume=True)


@pytest.mark.parametrize("what", ["pipe", "device"])
@pytest.mark.parametrize("name", ["checkpoint.pt", "rounds.jsonl", "config.toml", "clients.json", "summary.json"])
def test_loading_a_run_waits_for_no_pipe_in_its_folder(name: str, what: str, tmp_path: Path) -> None:
    table = {
        "data": {"name": "digits"}, "partition": {"kind": "iid", "clients": 5}, "model": {"name": "logistic"},
        "train": {"rounds": 1, "cohort": 2}, "algorithm": [{"name": "fedavg"}],
    }  # fmt: skip
    compare(parse(table), tmp_path)
    _no_file(tmp_path / "fedavg" / name, what)
    if name == "summary.json":
        assert fedge.load_run(tmp_path / "fedavg").rounds == 1
        assert not experiments.is_finished(tmp_path / "fedavg", 1)
        return
    with pytest.raises(RunFolderError, match=r"a pipe or a device|there is no run in"):
        fedge.load_run(tmp_path / "fedavg")


def test_a_fresh_run_does_not_wait_for_a_pipe_in_its_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rounds.jsonl")
    with pytest.raises(RunFolderError, match=r"cannot write to .*rounds\.jsonl"):
        go(tmp_path, rounds=2)


def _no_file(path: Path, what: str) -> None:
    path.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


def test_a_run_of_an_experiment_does_not_go_where_a_link_leads(tmp_path: Path) -> None:
    table = {
        "data": {"name": "digits"}, "partition": {"kind": "iid", "clients": 5}, "model": {"name": "logistic"},
        "train": {"rounds": 1, "cohort": 2}, "algorithm": [{"name": "fedavg"}],
    }  # fmt: skip
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.toml").write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/fedavg").symlink_to(tmp_path / "mine")
    with pytest.raises(ExperimentError, match=r"cannot write to .*fedavg: it is a link"):
        compare(parse(table), tmp_path / "out", resume=True)
    table["train"]["seed"] = {"sweep": [0, 1]}
    (tmp_path / "sweep.toml").write_text(toml.dump(table))
    folder = kept_runs(load_sweep(tmp_path / "sweep.toml"))[0].folder
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / folder).symlink_to(tmp_path / "mine")
    with pytest.raises(ExperimentError, match=r"cannot write to .*many.*: it is a link"):
        run_sweep(tmp_path / "sweep.toml", tmp_path / "many")
    assert [one.name for one in (tmp_path / "mine").iterdir()] == ["config.toml"]
    assert (tmp_path / "mine/config.toml").read_text() == "precious"
