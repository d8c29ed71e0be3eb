"""`fedge reproduce` on tiny experiments: the command, what it says, and where it finds the paper."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Namespace

import pytest
from typer.testing import CliRunner

from benchmarks.paper import measured
from benchmarks.paper.claims import claims
from benchmarks.paper.places import entries
from benchmarks.paper.tables import NOT_RUN, cells
from fedge.cli.app import app
from fedge.cli.listener import outcome
from fedge.sweep import Choices, Stopped, Store
from fedge.sweep.entries import innermost
from fedge.sweep.halving import TRIALS
from fedge.sweep.hardware import hardware
from fedge.sweep.runner import locked

from .facts import names, numbers
from .sweeps import FILES, fake, invoke, row, runner, said, tune


def test_a_tuning_of_one_cell_says_so(tiny: Path, tmp_path: Path) -> None:
    text = (tiny / "tune" / "fmnist-noniid.toml").read_text("utf-8")
    (tiny / "tune" / "fmnist-l3.toml").write_text(text, "utf-8")
    tune(runner(tmp_path), "fmnist", rounds=8, only=["FedOVA"])
    lines = [line for line in Store(tmp_path / TRIALS).lines if line.get("kind") == "choice"]
    assert {line.get("cell") for line in lines} == {None, "fmnist-l3"}
    again = CliRunner().invoke(app, ["reproduce", "tune", "--plan", "--rounds", "8", "--out", str(tmp_path)])
    assert "done   tune fmnist-l3, FedOVA" in again.output
    assert "to do  tune fmnist-l3, FedAvg" in again.output


def test_two_processes_in_one_folder_are_refused(tiny: Path, tmp_path: Path) -> None:
    options = ["--seeds", "1", "--rounds", "1", "--device", "cpu", "--out", str(tmp_path / "out")]
    with locked(tmp_path / "out"):
        done = CliRunner().invoke(app, ["reproduce", "noniid", *options])
    assert done.exit_code == 2
    assert "another process is at work" in done.output
    assert CliRunner().invoke(app, ["reproduce", "noniid", *options]).exit_code == 0


def test_what_diverged_gives_way_to_the_next_best_for_all_seeds(tiny: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "tune.jsonl")
    trials = [
        {"setting": {"lr": 0.3}, "rounds": 15, "validation": 0.9},
        {"setting": {"lr": 1e30}, "rounds": 60, "validation": 0.8},
        {"setting": {"lr": 0.1}, "rounds": 60, "validation": 0.7},
    ]
    for method in ("FedAvg", "FedOVA"):
        line = {"kind": "choice", "key": method, "dataset": "fmnist", "method": method}
        store.add({**line, "setting": {"lr": 1e30}, "trials": trials})
    assert Choices([store.path])("fmnist", "FedAvg") == [{"lr": 1e30}, {"lr": 0.1}, {"lr": 0.3}]
    assert Choices([store.path])("fmnist", "other") == []
    assert Choices([store.path], {"other": "FedAvg"})("fmnist", "other")[0] == {"lr": 1e30}, "of its backbone"
    options = ["--dataset", "fmnist", "--seeds", "2", "--rounds", "2", "--method", "FedAvg", "--device", "cpu"]
    done = CliRunner().invoke(app, ["reproduce", "noniid", *options, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "failed" in done.output
    results = Store(tmp_path / "results.jsonl")
    found = entries("noniid", "fmnist", [0, 1], 2, Choices([store.path]), results.diverged)
    used = {(entry.label, entry.seed): (entry.rank, innermost(entry.config["algorithm"])["lr"]) for entry in found}
    assert used["FedAvg", 0] == used["FedAvg", 1] == (1, 0.1)
    assert used["FedOVA", 0] == (0, 1e30), "nothing was run, so nothing diverged"
    assert "choice 2" in (tmp_path / "noniid-fmnist.md").read_text("utf-8")
    only_first = Store(tmp_path / "first.jsonl")
    for line in results.lines:
        if innermost(line["config"]["algorithm"])["lr"] == 1e30:
            known = {"failed": None, "final_accuracy": 0.125 + line["seed"] / 10, "seconds_a_round": 2.0}
            only_first.add(line | known | {"up_bytes": 3e6, "down_bytes": 3e6, "setup_bytes": 2e6})
    assert "fmnist-l2" not in " ".join(said(found, only_first)), "FedOVA was not run"
    cell = cells(found, only_first)["FedAvg"]["fmnist-l2"]
    assert numbers(cell.text()) == [17.5, 7.1, 0, 2, 1e30]
    assert NOT_RUN in cell.text()
    only_first.add(only_first.lines[0] | {"failed": "it diverged"})
    for entry in found:
        if entry.label == "FedOVA":
            only_first.add(fake(entry, 0.9))
    cell = cells(found, only_first)["FedAvg"]["fmnist-l2"]
    assert numbers(cell.text()) == [22.5, 1, 2, 1e30]
    assert NOT_RUN in cell.text()
    (claim,) = [one for one in claims(found, only_first) if names(one.said)[:3] == ["fmnist-l2", "FedOVA", "FedAvg"]]
    assert claim.holds is None
    assert claim.said.endswith(cell.text()), "why"
    details = [line for line in measured.details(found, only_first).splitlines() if "1e+30" in line]
    first = [numbers(line)[:6] for line in details]
    assert [1e30, 2, 2.0, 2.0, 0, 2.0] in first, "lr, rounds, MB, MB once, dropped, seconds"
    again = CliRunner().invoke(app, ["reproduce", "noniid", *options, "--out", str(tmp_path)])
    assert len(Store(tmp_path / "results.jsonl").lines) == len(results.lines), again.output


def test_one_method_alone(tiny: Path, tmp_path: Path) -> None:
    options = ["--dataset", "fmnist", "--seeds", "1", "--rounds", "1", "--device", "cpu", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["reproduce", "noniid", "clients", *options, "--method", "FedAvg"])
    assert done.exit_code == 0, done.output
    assert "FedOVA" not in done.output
    wrong = CliRunner().invoke(app, ["reproduce", "noniid", *options, "--method", "FedAgv"])
    assert wrong.exit_code == 2
    assert "did you mean 'FedAvg'" in wrong.output


def test_the_command_makes_table_figure_and_lines(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--rounds", "2", "--seeds", "1", "--device", "cpu", "--out", str(out))
    code, text = invoke("noniid", *options)
    assert code == 0, text
    page = (out / "noniid-fmnist.md").read_text()
    heading, _, head, *_ = page.splitlines()
    assert heading.startswith("# ")
    assert "Digits" in heading
    assert numbers(heading) == [2, 4], "rounds"
    assert names(head)[:2] == ["l = 2", "paper"]
    verdicts = [line for line in page.splitlines() if line.startswith("- ")]
    assert verdicts
    assert all("hold" in line and "so far" in line and numbers(line)[-2:] == [2, 4] for line in verdicts)
    assert (out / "noniid-fmnist.png").exists()
    assert len((out / "results.jsonl").read_text().splitlines()) == 4
    code, text = invoke("noniid", *options, "--plan")
    assert (code, text.count("done  "), text.count("to do"), numbers(text.splitlines()[-1])) == (0, 4, 0, [4, 4])
    code, text = invoke("noniid", *options)
    assert text.count("(was done)") == 4


SHORT = ("--method", "FedAvg", "--seeds", "1", "--rounds", "1", "--device", "cpu")


def test_what_is_written_takes_the_place_of_links_that_somebody_else_left(tiny: Path, tmp_path: Path) -> None:
    mine, out = tmp_path / "mine", tmp_path / "out"
    mine.write_text("precious")
    out.mkdir()
    for name in ("noniid-fmnist.md", "noniid-fmnist.png"):
        (out / name).symlink_to(mine)
    assert invoke("noniid", *SHORT, "--out", str(out))[0] == 0
    assert mine.read_text() == "precious"
    assert not any(path.is_symlink() for path in out.iterdir())


@pytest.mark.parametrize(
    ("name", "what", "message"),
    [
        ("results.jsonl", "link", "nothing is written through one"),
        ("results.jsonl", "pipe", "it is no file but a pipe"),
        ("runs", "folder", "nothing is written through one"),
        ("results.jsonl", "5", "line 1, is not a JSON object"),
        ("results.jsonl", "[" * 100_000, "line 1, is not a JSON object"),
    ],
)
def test_a_folder_from_somebody_else_is_refused_in_one_line(
    tiny: Path, tmp_path: Path, name: str, what: str, message: str
) -> None:
    mine, out = tmp_path / "mine", tmp_path / "out"
    out.mkdir()
    if what == "pipe":
        os.mkfifo(out / name)
    elif what in ("link", "folder"):
        (out / name).symlink_to(mine)
        mine.mkdir() if what == "folder" else mine.touch()
    else:
        (out / name).write_text(what + "\n")
    code, said = invoke("noniid", *SHORT, "--out", str(out))
    assert (code, message in said) == (2, True), said
    assert not (list(mine.iterdir()) if what == "folder" else what == "link" and mine.read_text())


def test_time_that_is_up_has_its_own_code(tiny: Path, tmp_path: Path) -> None:
    options = ("--device", "cpu", "--seeds", "1", "--out", str(tmp_path / "out"))
    code, text = invoke("noniid", *options, "--minutes", "0")
    assert code == 3
    assert "No round was done in this time" in text
    assert invoke("noniid", *options)[0] == 0


def test_however_short_the_time_every_command_gets_a_round_further(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is up in the middle of the first phase, whose round is kept."""
    clock = iter(range(10**6))
    monkeypatch.setattr("fedge.cli.reproduce.time.monotonic", lambda: next(clock))
    options = ("--method", "FedAvg", "--device", "cpu", "--seeds", "1", "--out", str(tmp_path / "out"))
    codes = []
    while not codes or codes[-1] == 3:
        code, text = invoke("noniid", *options, "--minutes", str(2.5 / 60))
        assert ("the same command goes on from here" in text) == (code == 3)
        assert "No round was done" not in text
        codes.append(code)
        assert len(codes) < 20
    assert codes[-1] == 0
    assert len(codes) > 2


def test_plan_says_what_there_is_to_tune_and_what_there_is_not(tiny: Path, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "out"))
    code, text = invoke("tune", "--plan", "--method", "FedAvg", *out)
    (line,) = text.splitlines()
    assert (code, line[:5], names(line), numbers(line)) == (0, "to do", ["FedAvg"], [4, 4]), "settings and rounds"
    assert invoke("tune", "--method", "FedAvg", "--device", "cpu", *out)[0] == 0
    (line,) = invoke("tune", "--plan", "--method", "FedAvg", *out)[1].splitlines()
    assert (line[:4], names(line)) == ("done", ["FedAvg"])
    (line,) = invoke("noniid", "--plan", "--dataset", "kws", *out)[1].splitlines()
    assert "nothing on kws" in line


def test_plan_says_with_which_step_and_how_long(tiny: Path, tmp_path: Path) -> None:
    """The time of a run is that of other seeds here; a run that two tables want counts once."""
    store, wanted = Store(tmp_path / "results.jsonl"), entries("noniid", "fmnist", [0, 1, 2])
    options = ("noniid", "noniid", "--plan", "--seeds", "3", "--device", "cpu", "--out", str(tmp_path))
    last = invoke(*options)[1].splitlines()[-1]
    assert (numbers(last), "counts once" in last) == ([0, 12], True)
    here = {"hardware": hardware("cpu"), "engine": {"precision": "fp32", "compile": False}, "at_a_time": 2}
    for entry in wanted:
        if (entry.cell, entry.seed) == ("fmnist-l2", 0):
            store.add(fake(entry, 0.5, seconds=120.0, **here))
        if (entry.cell, entry.seed) == ("fmnist-l2", 1):  # another machine
            store.add(fake(entry, 0.5, seconds=1.0, **here | {"hardware": "a larger one"}))
        if (entry.cell, entry.seed) == ("fmnist-l5", 1):
            store.add(fake(entry, 0.5, seconds=1.0, **here | {"engine": {"precision": "tf32", "compile": True}}))
    lines = invoke(*options)[1].splitlines()
    assert (lines[0][:4], names(lines[0]), numbers(lines[0])) == ("done", ["fmnist-l2", "FedAvg"], [0, 0.1, 4])
    done, _, rest = lines[-1].partition(hardware("cpu"))
    assert (numbers(done), "counts once" in done) == ([6, 12], True)
    assert numbers(rest.replace("2:00", "")) == [2, 6], "of the six others, two have other seeds here"
    assert "2:00" in rest


def test_outside_a_terminal_it_says_what_it_is_at(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("noniid", "--device", "cpu", "--seeds", "1", "--method", "FedAvg", "--out")
    _, text = invoke(*options, str(tmp_path / "a"))
    assert text.count("noniid fmnist-l2, FedAvg, seed 0: starting") == 1
    assert "round 1 of 4" not in text, "one line per minute"
    clock = iter(range(0, 10**6, 25))  # a look at it is 25 s later than the one before
    monkeypatch.setattr("fedge.cli.listener.time", Namespace(perf_counter=lambda: next(clock)))
    _, text = invoke(*options, str(tmp_path / "b"))
    assert 0 < text.count(" of 4, ") < 4


def test_a_stop_says_how_far_it_got(tiny: Path, tmp_path: Path) -> None:
    options = ("noniid", "--device", "cpu", "--seeds", "1", "--out", str(tmp_path))
    assert invoke(*options, "--method", "FedAvg")[0] == 0
    written = tmp_path / "noniid-fmnist.md"
    written.unlink()
    _, text = invoke(*options, "--minutes", "0")
    (stopped,) = [line for line in text.splitlines() if line.startswith("Stopped")]
    assert numbers(stopped) == [2, 4], "runs"
    assert str(written) in text.replace("\n", "")
    assert row(written.read_text("utf-8"), "FedOVA")[:3] == ["FedOVA", "99.0", NOT_RUN]
    _, text = invoke("tune", *options[:-1], str(tmp_path / "new"), "--minutes", "0")
    assert "Table" not in text
    assert not (tmp_path / "new" / written.name).exists()
    _, text = invoke("tune", *options[1:-1], str(tmp_path / "new"), "--minutes", "0")
    (stopped,) = [line for line in text.splitlines() if line.startswith("Stopped")]
    assert numbers(stopped) == [], "of tuning there is nothing to count"


def test_plan_tells_what_is_begun(tiny: Path, tmp_path: Path) -> None:
    first, *others = entries("noniid", "fmnist", [0])
    asked = iter([False, False, True])
    with pytest.raises(Stopped):
        runner(tmp_path, lambda: next(asked)).run(first)
    plan = ("noniid", "--plan", "--seeds", "1", "--device", "cpu", "--out", str(tmp_path))
    assert [line[:6] for line in invoke(*plan)[1].splitlines()] == ["begun ", *["to do "] * len(others), "0 of 4"]
    runner(tmp_path).run(first)
    assert [line[:6] for line in invoke(*plan)[1].splitlines()] == ["done  ", *["to do "] * len(others), "1 of 4"]


def test_tune_and_then_the_others_use_it(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text = invoke("tune", "noniid", "--rounds", "4", "--seeds", "1", "--device", "cpu", "--out", str(out))
    assert code == 0, text
    chosen = {line["method"]: line["setting"] for line in Store(out / TRIALS).lines if line.get("kind") == "choice"}
    for line in Store(out / "results.jsonl").lines:
        inner = line["config"]["algorithm"]
        while "inner" in inner:
            inner = inner["inner"]
        assert chosen[line["label"]].items() <= inner.items()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nonid",), "experiment is 'nonid' (did you mean 'noniid'?)"),
        (("noniid", "--dataset", "mnist"), "dataset is 'mnist'"),
        (("noniid", "--device", "tpu"), "device is 'tpu'"),
        (("noniid", "--precision", "foo", "--minutes", "0"), "precision is 'foo'"),
        (
            ("noniid", "--precision", "tf32", "--device", "cpu", "--minutes", "0"),
            "precision is 'tf32', which is for CUDA devices",
        ),
        (("noniid", "--compile", "--device", "cpu", "--minutes", "0"), "compile is for CUDA devices"),
        (("noniid", "--method", "fedavg"), "did you mean 'FedAvg'?"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], message: str) -> None:
    code, text = invoke(*words)
    assert code == 2
    assert message in text


def test_a_missing_data_set_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGE_DATA", str(tmp_path))
    code, text = invoke("noniid", "--dataset", "kws", "--device", "cpu", "--out", str(tmp_path / "out"))
    assert code == 2
    assert "fedge data get speech_commands" in " ".join(text.split())


def test_a_data_set_may_be_called_as_everywhere_else() -> None:
    options = ("--plan", "--out", "/nowhere", "--seeds", "1")
    assert invoke("noniid", "--dataset", "fashion_mnist", *options) == invoke("noniid", "--dataset", "fmnist", *options)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if fedge were installed from a wheel, in a folder that is no checkout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedge.cli.paper.BESIDE", tmp_path / "site-packages")
    return tmp_path


def test_without_the_repository_one_line_says_what_to_do(alone: Path) -> None:
    code, text = invoke("noniid", "--plan")
    assert code == 2
    assert len(text.splitlines()) == 1
    assert "git clone" in text
    assert "--paper" in text
    assert invoke("noniid", "--plan", "--paper", str(alone))[0] == 2, "a folder without it"


@pytest.mark.parametrize("named", [FILES, FILES.parents[1]])
def test_the_repository_can_be_named_or_be_the_current_folder(
    alone: Path, named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = invoke("noniid", "--plan", "--seeds", "1", "--paper", str(named))
    assert code == 0
    assert "6 runs" in text
    monkeypatch.chdir(FILES.parents[1])
    assert invoke("noniid", "--plan", "--seeds", "1") == (0, text)


def test_the_paper_is_loaded_by_its_path(alone: Path) -> None:
    """Also where another package has the name, and from another checkout than the one before."""
    (alone / "benchmarks").mkdir()
    (alone / "benchmarks" / "__init__.py").write_text("raise ImportError('another one')\n")
    ignored = shutil.ignore_patterns("results", "__pycache__")
    shutil.copytree(FILES, alone / "clone" / "benchmarks" / "paper", ignore=ignored)
    code = """
from pathlib import Path
from fedge.cli.paper import study
first, second = (study(Path(place)).files.root for place in {!r})
print(first, second, sep="\\n")
"""
    places = [str(alone / "clone"), str(FILES)]
    script = code.format(places)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=alone)
    assert found.stdout.split() == [str(alone / "clone" / "benchmarks" / "paper"), str(FILES)]


def test_a_run_that_collapsed_is_said_so() -> None:
    line = {"rounds": 200, "failed": None, "final_accuracy": 0.1, "best_accuracy": 0.9, "seconds_a_round": 1.0}
    fell = {**line, "test_accuracy": [0.9, 0.1]}
    assert numbers(outcome(fell)) == [10.0, 200, 90.0, 1], "accuracy, rounds, the best, seconds per round"
    assert "collapsed" in outcome(fell)
    assert "collapsed" not in outcome({**line, "test_accuracy": [0.9, 0.8]})
