"""Parts of the user's own in an experiment file: found, checked, kept with a checksum, never run unasked."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedge
from fedge.cli.app import app
from fedge.experiment import ExperimentError, build, compare, load, load_federation, own, plan
from fedge.experiment.planning import load_sweep, stored_sweep
from fedge.runs.folder import RunFolderError
from fedge.sweep import run_sweep
from tests import warm

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "own_parts" / "pumps.toml"

MINE = """
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

import fedge

with open(Path(__file__).with_name("log"), "a") as file:
    file.write("run ")

def load(count: int = 60, names=("a", "b")):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((count, 4)), np.arange(count) % 2
    x[:, 0] += 3 * y
    return fedge.data.from_arrays(x[20:], y[20:], x[:20], y[:20])

def owned(count: int = 60):
    data = load(count)
    return fedge.Federation(data, fedge.partition.by_group(np.arange(count - 20) % 5))

def halves(data, parts: int = 2):
    return np.array_split(np.arange(len(data.train_x)), parts)

def evens(y, clients: int):
    return [np.flatnonzero(np.arange(len(y)) % clients == one) for one in range(clients)]

class Net(nn.Module):
    def __init__(self, outputs, width=8, deep: bool = False):
        super().__init__()
        self.a, self.b = nn.Linear(4, width), nn.Linear(width, outputs)

    def forward(self, x):
        return self.b(self.a(x).relu())

def seeded(outputs: int, seed: int):
    return fedge.models.mlp(inputs=4, outputs=outputs, seed=seed)

@dataclass(frozen=True, eq=False)
class Half(fedge.FedAvg):
    share: float = 0.5

@dataclass(frozen=True, eq=False)
class Noted(fedge.FedAvg):
    seed: int = -1

    def init(self, params):
        return {**super().init(params), "at": None}

    def round(self, state):
        flow = super().round(state)
        reply = yield next(flow)
        try:
            flow.send(reply)
        except StopIteration as end:
            return {**end.value, "at": tuple(reply.at)}

    def notes(self, state):
        return {"at": state["at"], "field": self.seed}

def f1(scores, labels):
    return float((scores.argmax(1) == labels).float().mean())

def doubled(logits, y):
    return 2 * fedge.cross_entropy(logits, y)

def broken(count: int = 3):
    raise KeyError("owner")

number = 3
"""
BROKEN = 1 + MINE.splitlines().index('    raise KeyError("owner")')

FILE = """
name = "mine"
[data]
name = "mine.py:load"
[partition]
kind = "iid"
clients = 4
[model]
name = "mine.py:Net"
[train]
rounds = 3
cohort = 2
checkpoint_every = 1
[[algorithm]]
name = "mine.py:Half"
lr = 0.1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "exp.toml").write_text(FILE)
    return tmp_path / "exp.toml"


def fedge_command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return warm.run(["-m", "fedge", *words], cwd=cwd, env=env, timeout=240)


def test_every_kind_of_part(file: Path, tmp_path: Path) -> None:
    (one,) = compare(load(file), tmp_path / "out")
    assert one.label == "Half"
    assert one.folder.name == "half"
    assert one.run is not None
    assert type(one.run.algorithm).__name__ == "Half"
    assert type(one.run.algorithm.model).__name__ == "Net"


def test_they_do_what_the_same_parts_do_from_python(file: Path, tmp_path: Path) -> None:
    """The same first weights, data and rounds: the same bits."""
    (one,) = compare(load(file, ["algorithm.name=fedavg", "algorithm.lr=0.1"]), tmp_path / "out")
    space: dict[str, Any] = {"__file__": str(file.with_name("mine.py")), "__name__": "mine"}
    sys.modules.setdefault("mine", type(sys)("mine"))
    exec(MINE, space)
    del sys.modules["mine"]
    data = space["load"]()
    torch.manual_seed(0)
    algorithm = fedge.FedAvg(space["Net"](outputs=2), lr=0.1)
    federation = fedge.Federation(data, fedge.partition.iid(data.train_y, clients=4))
    run = fedge.train(algorithm, federation, rounds=3, cohort=2)
    assert one.run is not None
    assert all(torch.equal(leaf, run.params[name]) for name, leaf in one.run.params.items())


def test_the_generator_of_the_caller_is_left_alone(file: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    build(load(file))
    assert torch.equal(torch.rand(3), expected)


def test_seeds_of_own_models(file: Path) -> None:
    def first(*settings: str) -> torch.Tensor:
        (algorithm,) = build(load(file, settings)).algorithms.values()
        return next(algorithm.model.parameters())

    assert torch.equal(first(), first())
    assert not torch.equal(first(), first("train.seed=1"))
    assert torch.equal(first("train.seed=1"), first("model.seed=1"))
    assert torch.equal(
        first("model.name=mine.py:seeded", "model.seed=2"), first("model.name=mine.py:seeded", "train.seed=2")
    )


def test_clients_that_come_with_the_data(file: Path) -> None:
    file.write_text(
        FILE.replace("mine.py:load", "mine.py:owned").replace('[partition]\nkind = "iid"\nclients = 4\n', "")
    )
    assert build(load(file)).federation.clients == 5
    assert load_federation(file).clients == 5
    with pytest.raises(ExperimentError, match=r"come with their clients already: leave out \[partition\]"):
        build(load(file, ["partition.kind=iid", "partition.clients=2"]))
    with pytest.raises(ExperimentError, match=r"come without clients: add a table \[partition\]"):
        build(load(file, ["data.name=mine.py:load"]))


@pytest.mark.parametrize(
    ("settings", "clients"),
    [
        (["partition.kind=mine.py:halves"], 2),
        (["partition.kind=mine.py:evens", "partition.clients=7"], 7),
    ],
)
def test_own_partitions_take_labels_or_data(file: Path, settings: list[str], clients: int) -> None:
    assert build(load(file, settings)).federation.clients == clients


def test_losses_and_metrics(file: Path, tmp_path: Path) -> None:
    settings = [
        "algorithm.loss=mine.py:doubled",
        'train.metrics=["mine.py:f1"]',
        "train.until={name='reached', value=0.1, metric='test_f1'}",
    ]
    (one,) = compare(load(file, settings), tmp_path / "out")
    assert one.run is not None
    assert one.run.algorithm.loss.__name__ == "doubled"
    assert one.run.history[0]["test_f1"] == pytest.approx(one.run.history[0]["test_accuracy"])
    assert one.run.ended


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.cuont=3", "data: unknown key 'cuont' (did you mean 'count'?)"),
        ("data.count=many", "data: count is 'many', expected a whole number"),
        ("model.widht=3", "model: unknown key 'widht' (did you mean 'width'?)"),
        ("model.width=0.5", "model: width is 0.5, expected a whole number"),
        ("model.outputs=3", "model: outputs follows from the rest of the experiment"),
        ("algorithm.1.shaer=3", "algorithm 1 (mine.py:Half): unknown key 'shaer' (did you mean 'share'?)"),
        ("algorithm.share=x", "algorithm 1 (mine.py:Half): share is 'x', expected a number"),
        ("data.name=mine.py:laod", "(did you mean 'load'?)"),
        ("data.name=mine.py:number", "data: mine.py:number is a int, expected a function or a class"),
        ("model.name=nowhere.py:Net", "nowhere.py:Net: cannot read"),
        ("algorithm.1.name=mine.py:load", "is a function, expected a dataclass derived from fedge.Algorithm"),
        ("algorithm.1.name=mine.py:Net", "is a class, expected a dataclass derived from fedge.Algorithm"),
        ("partition.kind=mine.py:evens", "partition: clients is missing"),
    ],
)  # fmt: skip
def test_fields_are_checked(file: Path, setting: str, message: str) -> None:
    file.write_text(FILE.replace("clients = 4\n", "") if "evens" in setting else FILE)
    with pytest.raises(ExperimentError) as error:
        load(file, [setting])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.name=mine.py:broken", f"data: mine.py:broken raised KeyError: 'owner' (line {BROKEN})"),
        ("data.name=mine.py:Net", "data: outputs is missing"),
        ("model.name=mine.py:load", "model: mine.py:load gave a Data, expected an nn.Module"),
        ("data.name=mine.py:f1", "data: scores is missing, expected"),
    ],
)
def test_what_they_give_is_checked(file: Path, setting: str, message: str) -> None:
    with pytest.raises(ExperimentError) as error:
        build(load(file, [setting]))
    assert message in str(error.value)


def test_a_file_that_fails_names_its_line(file: Path) -> None:
    file.with_name("mine.py").write_text("import fedge\n\nx = 1 / 0\n")
    with pytest.raises(ExperimentError, match=r"mine.py cannot be run: ZeroDivisionError: division by zero \(line 3\)"):
        load(file)
    file.with_name("mine.py").write_text("def load(:\n")
    with pytest.raises(ExperimentError, match=r"SyntaxError.*\(line 1\)"):
        load(file)


# The run folder


def test_the_folder_names_the_file_and_its_checksum(file: Path, tmp_path: Path) -> None:
    compare(load(file), tmp_path / "out")
    for stored in (tmp_path / "out" / "experiment.toml", tmp_path / "out" / "half" / "config.toml"):
        text = stored.read_text()
        assert f'path = "{file.with_name("mine.py")}"' in text
        assert f'sha256 = "{hashlib.sha256(MINE.encode()).hexdigest()}"' in text
        assert 'name = "mine.py:Net"' in text


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, it makes this process forget what it has run, as another process would not know it."""
    return lambda: monkeypatch.setattr(own, "_MODULES", {})


def the_copy(out: Path) -> Path:
    return out / f"mine-{hashlib.sha256(MINE.encode()).hexdigest()[:12]}.py"


def test_resume_needs_the_same_code(file: Path, tmp_path: Path, fresh: Callable[[], None]) -> None:
    """From the folder alone it is refused before anything is run, and with the file named too; restored it goes on."""
    out, mine = tmp_path / "out", file.with_name("mine.py")
    compare(load(file), out)
    mine.write_text(MINE + "\n# changed\n")
    mine.with_name("log").write_text("")
    fresh()
    with pytest.raises(ExperimentError, match=r"mine.py has changed since .* restore the file, or start another run"):
        plan(None, ["train.rounds=5"], out, resume=True)
    assert mine.with_name("log").read_text() == ""
    job = plan(file, ["train.rounds=5"], out, resume=True)
    with pytest.raises(RunFolderError, match=r"mine.py has changed since the run began, its SHA-256 was"):
        compare(job.experiment, out, resume=True)
    mine.write_text(MINE)
    (one,) = compare(plan(None, ["train.rounds=5"], out, resume=True).experiment, out, resume=True)
    (whole,) = compare(load(file, ["train.rounds=5"]), tmp_path / "whole")
    assert one.run is not None
    assert whole.run is not None
    assert all(torch.equal(leaf, whole.run.params[name]) for name, leaf in one.run.params.items())


@pytest.mark.parametrize("gone", [False, True])
def test_a_run_goes_on_with_the_copy_if_asked(
    file: Path, tmp_path: Path, fresh: Callable[[], None], gone: bool
) -> None:
    out, mine = tmp_path / "out", file.with_name("mine.py")
    compare(load(file), out)
    assert the_copy(out).read_text() == MINE
    mine.unlink() if gone else mine.write_text("raise SystemExit\n")
    fresh()
    with pytest.raises(
        ExperimentError, match=r"mine-\w+.py is a copy, which `fedge run --resume .* --run-code` goes on"
    ):
        plan(None, ["train.rounds=5"], out, resume=True)
    job = plan(None, ["train.rounds=5"], out, resume=True, run_code=True)
    (one,) = compare(job.experiment, out, resume=True)
    mine.write_text(MINE)
    (whole,) = compare(load(file, ["train.rounds=5"]), tmp_path / "whole")
    assert one.run is not None
    assert whole.run is not None
    assert all(torch.equal(leaf, whole.run.params[name]) for name, leaf in one.run.params.items())


def test_a_sweep_goes_on_with_the_copy_in_several_processes(file: Path, tmp_path: Path) -> None:
    """What the file finds beside itself is still found: the copy runs in the place of the file."""
    beside = tmp_path / "beside.py"
    beside.write_text("WIDTH = 8\n")
    mine = file.with_name("mine.py")
    mine.write_text(MINE + "\nfrom beside import WIDTH\nassert Path(__file__).with_name('beside.py').is_file()\n")
    first = fedge_command("run", str(file), "--set", "train.seeds=[0, 1]", "--out", "out", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    mine.write_text("raise SystemExit\n")
    words = ["run", "--resume", "--out", "out", "--set", "train.seeds=[0, 1, 2]", "--jobs", "2"]
    refused = fedge_command(*words, cwd=tmp_path)
    assert refused.returncode != 0
    assert "has changed since" in refused.stderr
    done = fedge_command(*words, "--run-code", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["state"] for row in fedge.results(tmp_path / "out")] == ["done"] * 3


OTHER = """
import os
import numpy as np
import fedge

def load():
    text = np.loadtxt(os.environ.get("OTHER") if os.environ.get("RANK") == "1" else "data.csv")
    return fedge.data.from_arrays(text[20:, :4], text[20:, 4].astype(int), text[:20, :4], text[:20, 4].astype(int))
"""


def written(place: Path, change: float = 0.0, row: int = 30) -> None:
    rng = np.random.default_rng(0)
    text = np.column_stack([rng.standard_normal((60, 4)), np.arange(60) % 2])
    text[row, 1] += change
    np.savetxt(place, text)


@pytest.fixture
def reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment whose data are a file that may change."""
    (tmp_path / "other.py").write_text(OTHER)
    net = FILE.replace("mine.py:load", "other.py:load").replace("mine.py:Net", "mlp").replace("mine.py:Half", "fedavg")
    (tmp_path / "exp.toml").write_text(net)
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "data.csv")
    return tmp_path / "exp.toml"


@pytest.mark.parametrize("row", [30, 3])  # of the training and of the test set
def test_a_run_does_not_go_on_with_other_data(reading: Path, tmp_path: Path, row: int) -> None:
    compare(load(reading), tmp_path / "out")
    written(tmp_path / "data.csv", 0.01, row)
    with pytest.raises(RunFolderError, match="its clients held other examples than these, or its test set"):
        compare(load(reading, ["train.rounds=5"]), tmp_path / "out", resume=True)
    written(tmp_path / "data.csv", 1e-7, row)  # as by another machine
    (one,) = compare(load(reading, ["train.rounds=5"]), tmp_path / "out", resume=True)
    assert one.run is not None
    assert one.run.rounds == 5


def test_attacks_on_other_data_are_computed_anew(reading: Path, tmp_path: Path) -> None:
    words = ["attack", "exp.toml", "--kind", "sign_flip", "--share", "0.25", "--defence", "mean", "--out", "out"]
    counts = []
    for change in (0.0, 0.0, 0.01):
        written(tmp_path / "data.csv", change)
        assert CliRunner().invoke(app, words).exit_code == 0
        counts.append(len((tmp_path / "out" / "attacks.jsonl").read_text().splitlines()))
    assert counts == [2, 2, 4]


def test_ranks_with_other_data_are_refused(reading: Path, tmp_path: Path) -> None:
    written(tmp_path / "other.csv", 0.01)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "OTHER": "other.csv"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "fedge"]
    words = ["run", "exp.toml", "--out", "two", "--no-report"]
    done = subprocess.run([*command, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert "Error: rank 1 has other examples than rank 0: give every process the same data" in done.stderr
    assert not (tmp_path / "two" / "fedavg").exists()


def test_only_a_folder_has_copies_to_run(file: Path, tmp_path: Path) -> None:
    for words in ({"resume": False}, {"resume": True}, {"resume": True, "out": tmp_path, "file": file}):
        with pytest.raises(ExperimentError, match="--run-code is for the copies in a folder of runs: use it with"):
            plan(**words, run_code=True)  # type: ignore[arg-type]


def test_a_copy_that_was_changed_is_not_run(file: Path, tmp_path: Path, fresh: Callable[[], None]) -> None:
    (one,) = compare(load(file), tmp_path / "out")
    file.with_name("mine.py").write_text(MINE + "# changed")
    the_copy(tmp_path / "out").write_text(MINE + "# also")
    fresh()
    with pytest.raises(RunFolderError, match=r"has changed since .* or start another run; or give it .*load_run"):
        fedge.load_run(one.folder, run_code=True)


EVIL = MINE + "\nPath(__file__).with_name('evil').touch()\n"


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def forge(run: Path) -> list[Path]:
    """Put EVIL's checksum for MINE's into the files of a run and of its folder of runs; returns these files."""
    files = [run.parent / "experiment.toml", run / "config.toml"]
    for stored in files:
        stored.write_text(stored.read_text().replace(checksum(MINE), checksum(EVIL)))
    return files


def test_a_folder_that_somebody_made_runs_no_copy_unasked(
    file: Path, tmp_path: Path, fresh: Callable[[], None]
) -> None:
    """A table [code] with the place of a file of the user's, and the checksum of a copy that is somebody else's."""
    out = tmp_path / "out"
    (one,) = compare(load(file), out)
    forge(one.folder)
    (out / f"mine-{checksum(EVIL)[:12]}.py").write_text(EVIL)
    fresh()
    with pytest.raises(RunFolderError, match="none is run unasked"):
        fedge.load_run(one.folder)
    with pytest.raises(ExperimentError, match=r"mine.py has changed since"):
        plan(None, [], out, resume=True)
    for words in (["report", "out"], ["sweep", "show", "out"], ["run", "--resume", "--out", "out"]):
        fedge_command(*words, cwd=tmp_path)
    assert not (tmp_path / "evil").exists()


def test_a_folder_that_somebody_made_runs_no_file_in_it_unasked(
    file: Path, tmp_path: Path, fresh: Callable[[], None]
) -> None:
    """A table [code] whose path leads into the folder itself, with the right checksum."""
    out = tmp_path / "out"
    (one,) = compare(load(file), out)
    for stored in forge(one.folder):
        text = stored.read_text().replace(str(file.with_name("mine.py")), "evil.py")
        assert '"evil.py"' in text
        stored.write_text(text)
        stored.with_name("evil.py").write_text(EVIL)
    fresh()
    with pytest.raises(ExperimentError, match=r"evil.py lies in the folder of the run.*--run-code"):
        plan(None, ["train.rounds=5"], out, resume=True)
    fedge_command("run", "--resume", "--out", "out", cwd=tmp_path)
    assert not list(tmp_path.rglob("evil"))
    fresh()
    plan(None, ["train.rounds=5"], out, resume=True, run_code=True)
    assert list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("code", ["", '[code."evil.py"]\npath = "evil.py"\n', "[code]\n"])
@pytest.mark.parametrize("where", ["evil.py", "../evil.py"])
def test_a_folder_that_somebody_made_runs_no_file_without_a_checksum(
    file: Path, tmp_path: Path, fresh: Callable[[], None], code: str, where: str
) -> None:
    """Its experiment names a file as one of the user's does, which is no folder of runs."""
    out = tmp_path / "out"
    out.mkdir()
    text = file.read_text().replace("mine.py", where)
    (out / "experiment.toml").write_text(text + code.replace("evil.py", where))
    (out / where).write_text(EVIL)
    why = "lies in the folder of the run" if where == "evil.py" else "has no checksum in the folder of the run"
    with pytest.raises(ExperimentError, match=rf"evil.py {why}.*--run-code"):
        plan(None, ["train.rounds=5"], out, resume=True)
    for words in (["run", "--resume", "--out", "out"], ["sweep", "show", "out"], ["report", "out"]):
        fedge_command(*words, cwd=tmp_path)
    assert not list(tmp_path.rglob("evil"))
    fresh()
    plan(None, ["train.rounds=5"], out, resume=True, run_code=True)
    assert list(tmp_path.rglob("evil"))


def test_a_run_that_is_at_work_keeps_the_code_that_it_began_with(file: Path, tmp_path: Path) -> None:
    experiment = load(file)
    file.with_name("mine.py").write_text("raise SystemExit\n")
    (one,) = compare(experiment, tmp_path / "out")
    assert one.run is not None
    assert the_copy(tmp_path / "out").read_text() == MINE


def test_files_may_move_before_a_run_goes_on(file: Path, tmp_path: Path, fresh: Callable[[], None]) -> None:
    out, new = tmp_path / "out", tmp_path / "elsewhere"
    compare(load(file), out)
    new.mkdir()
    for name in ("mine.py", "exp.toml"):
        (tmp_path / name).rename(new / name)
    fresh()
    with pytest.raises(ExperimentError, match=r"cannot read .*mine.py"):
        plan(None, [], out, resume=True)
    job = plan(new / "exp.toml", ["train.rounds=4"], out, resume=True)
    (one,) = compare(job.experiment, out, resume=True)
    assert one.run is not None
    assert one.run.rounds == 4


# Nothing is run unasked


def ran(file: Path) -> bool:
    return bool(file.with_name("log").read_text())


def test_looking_at_a_folder_runs_nothing(file: Path, tmp_path: Path) -> None:
    """In a process of its own, as modules are kept: show, report, results, and the search for what to resume."""
    done = fedge_command("run", str(file), "--set", "train.seeds=[0, 1]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file.with_name("log").write_text("")
    for words in (["sweep", "show", "runs/mine"], ["report", "runs/mine"]):
        done = fedge_command(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert not ran(file), words
    done = fedge_command("export", "runs/mine/half-seed-0", "model.pt", cwd=tmp_path)
    assert done.returncode != 0
    assert "none is run unasked" in done.stderr
    assert not ran(file)
    assert len(fedge.results(tmp_path / "runs" / "mine")) == 2
    assert len(stored_sweep(tmp_path / "runs" / "mine").runs()) == 2
    assert not ran(file)
    done = fedge_command("export", "runs/mine/half-seed-0", "model.pt", "--run-code", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ran(file)
    assert {*torch.load(tmp_path / "model.pt", weights_only=True)} == {"a.weight", "a.bias", "b.weight", "b.bias"}


def test_load_run(file: Path, tmp_path: Path, fresh: Callable[[], None]) -> None:
    (one,) = compare(load(file), tmp_path / "out")
    with pytest.raises(RunFolderError, match=r"none is run unasked: allow it"):
        fedge.load_run(one.folder)
    x = build(load(file)).federation.data.test_x
    assert one.run is not None
    expected = one.run.scores(x)
    assert torch.equal(fedge.load_run(one.folder, run_code=True).scores(x), expected)
    given = type(one.run.algorithm)(one.run.algorithm.model, lr=0.1)
    assert torch.equal(fedge.load_run(one.folder, given).scores(x), expected)
    file.with_name("mine.py").write_text("raise SystemExit\n")
    fresh()
    assert torch.equal(fedge.load_run(one.folder, run_code=True).scores(x), expected), "of the copy"
    the_copy(tmp_path / "out").unlink()
    fresh()
    with pytest.raises(RunFolderError, match=r"has changed since .* or give it .*load_run\('.*/half', algorithm\)"):
        fedge.load_run(one.folder, run_code=True)
    assert torch.equal(fedge.load_run(one.folder, given).scores(x), expected)


def test_own_data_alone_need_no_code_to_load_a_run(file: Path, tmp_path: Path) -> None:
    (one,) = compare(load(file, ["model.name=logistic", "algorithm.1.name=fedavg"]), tmp_path / "out")
    file.with_name("mine.py").write_text("raise SystemExit\n")
    assert fedge.load_run(one.folder).rounds == 3


# Sweeps and processes


def test_sweeps_over_own_fields_in_several_processes(file: Path, tmp_path: Path) -> None:
    settings = ["algorithm.share={sweep = [0.1, 0.2]}", "train.seeds=[0, 1]"]
    rows = run_sweep(file, tmp_path / "one", settings=settings)
    assert {row["label"].split()[0] for row in rows} == {"Half"}
    assert {row["algorithm.share"] for row in rows} == {0.1, 0.2}
    assert {Path(row["folder"]).name for row in rows} >= {"half-share-0.1-seed-0"}
    two = fedge_command(
        "run", str(file), *(w for s in settings for w in ("--set", s)), "--jobs", "2", "--out", "two", cwd=tmp_path
    )
    assert two.returncode == 0, two.stderr
    again = fedge.results(tmp_path / "two")
    key = ("algorithm.share", "train.seed", "final_loss")
    assert sorted([row[k] for k in key] for row in rows) == sorted([row[k] for k in key] for row in again)


def test_models_can_be_swept_with_own_ones_among_them(file: Path) -> None:
    runs = load_sweep(file, ["model.name={sweep = ['mine.py:Net', 'logistic']}"]).runs()
    assert [run.folder for run in runs] == ["half-name-mine.py-net", "half-name-logistic"]


def test_two_ranks(file: Path, tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "fedge"]
    done = subprocess.run(
        [*command, "run", str(file), "--out", "two", "--no-report"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (one,) = compare(load(file), tmp_path / "one")
    assert one.run is not None
    two = fedge.load_run(tmp_path / "two" / "half", run_code=True)
    assert all(torch.allclose(leaf, two.params[name], atol=1e-6) for name, leaf in one.run.params.items())


def test_the_example(tmp_path: Path) -> None:
    done = fedge_command("run", str(EXAMPLE), "--no-report", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = fedge.results(tmp_path / "out", target=0.8)
    assert {row["label"] for row in rows} == {"Spring", "fedavg"}
    assert all(row["final_accuracy"] > 0.8 for row in rows)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_the_csv_of_the_example_is_what_its_code_writes(tmp_path: Path) -> None:
    space: dict[str, Any] = {"__file__": str(EXAMPLE.with_name("mine.py")), "__name__": "pumps_example"}
    sys.modules["pumps_example"] = type(sys)("pumps_example")
    try:
        exec(EXAMPLE.with_name("mine.py").read_text(), space)
    finally:
        del sys.modules["pumps_example"]
    space["write"](tmp_path / "pumps.csv")
    assert (tmp_path / "pumps.csv").read_text() == EXAMPLE.with_name("pumps.csv").read_text()


def test_an_algorithm_sees_the_seed_and_the_round(file: Path, tmp_path: Path) -> None:
    settings = ["algorithm.name=mine.py:Noted", "train.seed=7"]
    (one,) = compare(load(file, settings), tmp_path / "out")
    assert one.run is not None
    assert [record["at"] for record in one.run.history] == [(7, 1, 0), (7, 2, 0), (7, 3, 0)]
    assert {record["field"] for record in one.run.history} == {7}, "a field `seed` is that of [train]"
    assert one.run.device == torch.device("cpu")
    (algorithm,) = build(load(file, [*settings, "algorithm.seed=3"])).algorithms.values()
    assert getattr(algorithm, "seed", None) == 3
    (two,) = compare(load(file, settings), tmp_path / "out", resume=True)
    assert two.run is not None


def test_partition_show_has_the_names_of_clients_and_labels(file: Path) -> None:
    file.with_name("mine.py").write_text(
        MINE
        + """
def words():
    found = load()
    y = np.array(["healthy", "broken"])
    data = fedge.data.from_arrays(found.train_x, y[found.train_y], found.test_x, y[found.test_y])
    return fedge.Federation(data, fedge.partition.by_group(np.array(["ann", "a-very-long-name-" * 2] * 20)))
"""
    )
    words = ["partition", "show", str(file), "--set", 'data={name = "mine.py:words"}', "--set", "partition={}"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    head, first, second = found.output.splitlines()[-3:]
    assert head.split() == ["label", "broken", "healthy"]
    assert first.split()[0] == "a-very-long-name-a-very…"
    assert second.split()[0] == "ann"


def test_partition_show(file: Path) -> None:
    found = CliRunner().invoke(app, ["partition", "show", str(file), "--json"])
    assert found.exit_code == 0, found.output
    assert '"clients": 4' in found.output
