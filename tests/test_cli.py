"""The command line: what it prints, where it writes, and how it ends."""

from __future__ import annotations

import builtins
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import fedge
from fedge import cli
from fedge.cli import progress, results, text
from fedge.cli.app import COMMANDS, app
from fedge.cli.interrupt import Interrupt
from fedge.cli.lazy import Later
from fedge.engine.uploads.checks import TooFewReplies
from fedge.experiment import Progress
from fedge.report import ReportError
from fedge.runs import checkpoint

SMALL = """
name = "small"
target = 0.05
[data]
name = "digits"
[partition]
kind = "iid"
clients = 10
[model]
name = "mlp"
hidden = [4]
[train]
rounds = 3
cohort = 3
[[algorithm]]
name = "fedavg"
epochs = 1
[[algorithm]]
name = "fedavg"
label = "Big steps"
epochs = 1
lr = 0.5
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with one experiment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path


def call(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def run(*words: str) -> Result:
    return call("run", "small.toml", "--no-report", *words)


@pytest.mark.parametrize("lr", ["1e8", "1e12", "1e30"])
def test_a_run_that_diverges_says_so_and_does_not_exit_with_zero(here: Path, lr: str) -> None:
    """Also if every number in it is finite."""
    result = run("--set", f"algorithm.lr={lr}", "--out", "wild", "--json")
    assert result.exit_code == 1
    assert "done" not in result.stderr.replace("FedAvg", "")
    for row in json.loads(result.stdout)["runs"]:
        assert row["failed"]
        assert f"{row['label']} failed: {row['failed']}" in result.stderr
    again = call("run", "--resume", "--out", "wild", "--no-report")  # the end of it is on record
    assert again.exit_code == 1


def test_what_is_no_divergence(here: Path) -> None:
    result = run("--out", "tame", "--json")
    assert result.exit_code == 0
    assert all(row["failed"] is None and row["diverged"] is None for row in json.loads(result.stdout)["runs"])


def refused(result: Result, words: str, code: int = 2) -> None:
    """One line on stderr that says so, and nothing else."""
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


# fedge run


def test_a_run_ends_with_a_table_a_report_and_a_picture(here: Path) -> None:
    result = call("run", "small.toml")
    assert result.exit_code == 0, result.output
    for words in (
        "Running small in runs/small",
        "fedavg: round 1/3, acc ",
        "fedavg: round 3/3",
        "ms/round, done",
        "Big steps",
        "to 5%",
        "final: the last round",
        "Report   runs/small/report.html",
        "Picture  runs/small/accuracy.png",
    ):
        assert words in result.stdout
    assert (here / "runs/small/report.html").is_file()
    assert (here / "runs/small/accuracy.png").is_file()
    assert (here / "runs/small/big-steps/summary.json").is_file()


def test_a_second_run_gets_its_own_folder(here: Path) -> None:
    for folder in ("small", "small-2"):
        assert f"Running small in runs/{folder}" in run("--set", "train.rounds=1").stdout
    assert (here / "runs/small-2/experiment.toml").is_file()


def test_json_is_the_only_thing_on_stdout() -> None:
    result = run("--json", "--set", "train.rounds=2")
    found = json.loads(result.stdout)
    assert [one["label"] for one in found["runs"]] == ["fedavg", "Big steps"]
    assert found["runs"][0]["rounds"] == 2
    assert found["runs"][0]["rounds_to_target"] == 1
    assert found["folder"] == "runs/small"
    assert "round 2/2" in result.stderr


def test_json_has_no_word_that_json_does_not_know() -> None:
    assert json.loads(text.to_json({"a": [float("nan"), 1.0], "b": float("inf")})) == {"a": [None, 1.0], "b": None}


def test_quiet_prints_nothing() -> None:
    assert run("--quiet").output == ""
    assert json.loads(run("--quiet", "--json").output)["folder"] == "runs/small-2"


def test_settings_and_device() -> None:
    result = run("--set", "algorithm.big-steps.lr=0.25", "--set", "name=other", "--device", "cpu", "--out", "there")
    assert result.exit_code == 0, result.output
    assert "Running other in there" in result.stdout
    config = Path("there/big-steps/config.toml").read_text()
    assert "lr = 0.25" in config
    assert 'device = "cpu"' in config


def test_without_a_target_it_is_the_one_of_the_report() -> None:
    text = Path("small.toml").read_text().replace("target = 0.05\n", "")
    Path("small.toml").write_text(text)
    result = run("--json")
    found = json.loads(result.stdout)
    assert found["target"] is not None
    assert found["runs"][1]["rounds_to_target"] is not None


def test_tensorboard_logs_every_run(here: Path) -> None:
    result = run("--tensorboard", "--set", "train.rounds=1")
    assert result.exit_code == 0, result.output
    assert "tensorboard --logdir runs/small" in result.stdout
    assert list((here / "runs/small/fedavg/tensorboard").glob("events*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.toml"], "there is no file none.toml"),
        (["."], "is a folder, expected an experiment file"),
        (["broken.toml"], "broken.toml is not TOML: Invalid value (at line 2, column 10)"),
        (["empty.toml"], "empty.toml has no tables: an experiment needs [data], [partition], [model], [train] and [["),
        (
            ["twice.toml"],
            "twice.toml is not TOML: Cannot declare ('algorithm',) twice (at line 4, column 11); write [[",
        ),
        (["small.toml", "--set", "rounds=3"], "--set rounds: unknown key 'rounds' (did you mean train.rounds?)"),
        (["typo.toml"], "train: unknown key 'runds' (did you mean 'rounds'?)"),
        (["small.toml", "--set", "train.rounds=0"], "train: rounds is 0"),
        (["small.toml", "--set", "train.rounds=many"], "train: rounds is 'many', expected a whole number"),
        (["small.toml", "--set", "train.cohort=11"], "train: cohort is 11, but there are only 10 clients"),
        (["small.toml", "--set", "algorithm.lrr=1"], "--set algorithm: unknown key 'lrr' (did you mean 'lr'?)"),
        (["small.toml", "--set", "rounds"], "--set rounds: expected key=value"),
        (["small.toml", "--set", "algorithm.lr=0"], "algorithm 1 (fedavg): lr is 0, it must be greater than 0"),
        (["small.toml", "--device", "tpu"], "train: device is 'tpu', on this machine there is: auto, cpu"),
        (["small.toml", "--out", "small.toml"], "small.toml is a file: choose a folder for the run"),
        (["small.toml", "--resume"], "there is nothing to resume: no experiment 'small' in runs/"),
        (["--resume", "--out", "nowhere"], "nowhere holds no experiment.toml"),
        (["pipe.toml"], "cannot read pipe.toml: it is no file but a pipe or a device"),
        (["/dev/zero"], "cannot read /dev/zero: it is no file but a pipe or a device"),
    ],
)
def test_what_cannot_be_run_gets_one_line(here: Path, words: list[str], message: str) -> None:
    (here / "broken.toml").write_text("[train]\nrounds = \n")
    (here / "empty.toml").write_text("# nothing yet\n")
    (here / "twice.toml").write_text("[algorithm]\nlr = 1\n\n[algorithm]\nlr = 2\n")
    (here / "typo.toml").write_text(SMALL.replace("rounds = 3", "runds = 3"))
    os.mkfifo(here / "pipe.toml")
    before = sorted(here.iterdir())
    refused(call("run", *words), message)
    assert sorted(here.iterdir()) == before, "nothing is left behind"


def test_a_folder_with_a_run_is_not_overwritten() -> None:
    assert run("--out", "there", "--set", "train.rounds=1").exit_code == 0
    refused(run("--out", "there"), "there already holds a run: add --resume to go on with it, or choose another --out")


def test_a_wrong_option_is_a_usage_error() -> None:
    assert call("run", "--rounds", "3").exit_code == 2
    assert call("walk").exit_code == 2


def test_an_algorithm_that_diverges_does_not_end_the_others(here: Path) -> None:
    diverges = ["--set", "algorithm.fedavg.lr=1e30", "--set", "train.rounds=2"]
    result = call("run", "small.toml", *diverges)
    assert result.exit_code == 1, result.output
    assert re.search(r"fedavg +\d +failed( +–){6}", result.stdout)
    assert re.search(r"Big steps +2 ", result.stdout)
    assert result.stderr.startswith("Error: fedavg failed: ")
    assert "it diverged: the test loss of round 2 is" in result.stderr
    assert "good.pt" in result.stderr, "the way back"
    assert result.stderr.count("\n") == 1
    assert "Big steps" in (here / "runs/small/report.html").read_text()
    again = call("run", "--resume", "--json", "--quiet", "--out", "runs/small")
    assert again.exit_code == 1, again.output
    failed, fine = json.loads(again.stdout)["runs"]
    assert "it diverged" in failed["failed"]
    assert failed["rounds"] == 2, "its rounds are on record"
    assert (fine["failed"], fine["rounds"]) == (None, 2)


def test_the_rounds_before_a_failure_are_reported(here: Path) -> None:
    grows = ["--set", "algorithm.fedavg.lr=1", "--set", "algorithm.fedavg.weight_decay=10"]
    result = call("run", "small.toml", "--json", "--set", "train.rounds=8", *grows)
    assert result.exit_code == 1, result.output
    failed = json.loads(result.stdout)["runs"][0]
    assert 0 < failed["rounds"] < 8
    assert failed["failed"].startswith(f"round {failed['rounds'] + 1}: ")
    page = (here / "runs/small/report.html").read_text()
    assert f"{failed['rounds']} of 8, failed" in page
    assert f"fedavg failed: round {failed['rounds'] + 1}: " in page


def test_a_report_that_finds_no_room_is_no_refusal_of_the_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise ReportError("cannot write report.html: No space left on device; choose another place")

    monkeypatch.setattr("fedge.cli.run.write_report", full)
    result = call("run", "small.toml", "--json", "--set", "train.rounds=1", "--set", "algorithm=[{name='fedavg'}]")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("Error: no report was written: cannot write ")
    assert result.stderr.endswith("The runs are done: go on with fedge report runs/small\n")
    found = json.loads(result.stdout)
    assert (found["report"], found["runs"][0]["rounds"]) == (None, 1)


def test_an_error_without_words_gets_some(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("fedge.cli.run.plan", none)
    result = call("run", "small.toml")
    assert (result.exit_code, result.stderr) == (
        1,
        "Error: out of memory: free some, or give it smaller files, models or cohorts\n",
    )


def test_when_all_fail_there_is_no_report(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise TooFewReplies("round 1: 0 of 3 replies\nwere good")

    monkeypatch.setattr("fedge.experiment.comparison.train", broken)
    result = call("run", "small.toml")
    assert result.exit_code == 1
    reason = "failed: round 1: 0 of 3 replies were good"
    assert result.stderr == f"Error: fedavg {reason}\nError: Big steps {reason}\n"
    assert "No report was written: no algorithm has a round" in result.stdout
    assert not (here / "runs/small/report.html").exists()


def test_the_table_fits_into_80_columns() -> None:
    from rich.console import Console

    row = {"label": "FedOVA + spectral", "failed": None, "rounds": 1000, "final_rounds": 20}
    row |= {"final_accuracy": 1.0, "best_accuracy": 1.0, "up_bytes": 99.9e6, "down_bytes": 99.9e6}
    row |= {"rounds_to_target": 1000, "megabytes_to_target": 199.8, "seconds": 999.9}
    console = Console(width=80, record=True)
    results.print_table(console, [row | {"metrics": {}}], 0.85, Path("runs"))
    *_, last = console.export_text().splitlines()
    assert last.split("  ")[0] == "FedOVA + spectral"
    assert last.endswith("999.9")
    assert results.note([row]) == "final: mean of the last 20 rounds"
    whence = "; 51%: 90 % of the best accuracy, because no target is set"
    assert results.note([row], 0.51) == f"final: mean of the last 20 rounds{whence}"


def test_a_target_that_nobody_set_is_explained(here: Path) -> None:
    """Under the table, and in the report that a run writes; one that was set is not."""
    Path("small.toml").write_text(Path("small.toml").read_text().replace("target = 0.05\n", ""))
    told = call("run", "small.toml", "--set", "train.rounds=2").stdout
    assert "90 % of the best accuracy, because no target is set" in " ".join(told.split())
    page = (here / "runs/small/report.html").read_text()
    assert "It is the default: 90 % of the best accuracy" in page
    told = call("run", "small.toml", "--set", "train.rounds=2", "--set", "target=0.3", "--out", "other").stdout
    assert "no target is set" not in told
    assert "It is the default" not in (here / "other/report.html").read_text()


def test_without_matplotlib_there_is_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    _hide(monkeypatch, "matplotlib")
    result = call("run", "small.toml", "--set", "train.rounds=1")
    assert result.exit_code == 0, result.output
    assert "No report was written: fedge report needs matplotlib: pip install 'fedge[report]'" in result.stdout
    refused(call("report", "runs/small"), "pip install 'fedge[report]'", code=1)


def test_without_tensorboard_nothing_is_trained(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    monkeypatch.setattr("fedge.cli.run.find_spec", lambda name: None)
    refused(run("--tensorboard"), "--tensorboard needs tensorboard: pip install 'fedge[report]'", code=1)
    assert not (here / "runs").exists()


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_one_line_names_it(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _hide(monkeypatch, missing)
    for name in [name for name in sys.modules if name.startswith("fedge.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert capsys.readouterr().err == f"The command line needs {missing}: pip install 'fedge[cli]'\n"


def _hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As if it were not installed."""
    real = builtins.__import__

    def guarded(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(name, *rest, **more)

    for name in [name for name in sys.modules if name.startswith("fedge.report.")]:
        if package == "matplotlib" and name.rsplit(".")[-1] in ("figures", "page", "heatmap", "svg", "curves", "style"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", guarded)


# Stopping and going on


class Stopping:
    """Stands for Ctrl-C: asks to stop at the n-th look."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    def __call__(self, say: Any, also: Any = ()) -> Stopping:
        return self

    def __enter__(self) -> Stopping:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wanted(self) -> bool:
        self.left -= 1
        return self.left < 0


def final(folder: str) -> tuple[list[Any], list[dict[str, Any]]]:
    """The parameters and the record of both runs, seconds aside."""
    params, records = [], []
    for run in ("fedavg", "big-steps"):
        state = checkpoint.load(Path(folder, run, "checkpoint.pt"))["state"]
        params += list(state["params"].values())
        lines = Path(folder, run, "rounds.jsonl").read_text().splitlines()
        records += [{key: one for key, one in json.loads(line).items() if key != "seconds"} for line in lines]
    return params, records


def test_stop_says_how_to_go_on_and_resume_ends_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--out", "whole").exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr("fedge.cli.torchrun.Interrupt", Stopping(2))
        stopped = run("--out", "part")
    assert stopped.exit_code == 130
    assert stopped.stderr == "Stopped. The checkpoints are in part. Go on with:\n" + (
        "  fedge run --resume --out part --no-report\n"
    )
    assert not Path("part/big-steps").exists()
    resumed = call("run", "--resume", "--out", "part", "--no-report")
    assert resumed.exit_code == 0, resumed.output
    assert "Going on with small in part" in resumed.stdout
    (one, record), (other, again) = final("whole"), final("part")
    assert record == again
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_resume_without_a_folder_takes_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("fedge.cli.torchrun.Interrupt", Stopping(2))
        assert run().exit_code == 130
    result = run("--resume")
    assert result.exit_code == 0, result.output
    assert "Going on with small in runs/small\n" in result.stdout
    refused(run("--resume"), "there is nothing to resume: runs/small is finished")
    more = call("run", "--resume", "--out", "runs/small", "--no-report", "--set", "train.rounds=4")
    assert "fedavg: going on after round 3\n" in more.stdout
    assert "fedavg: round 4/4" in more.stdout
    assert "was already finished" in call("run", "--resume", "--out", "runs/small", "--no-report").stdout


def test_resume_refuses_another_experiment_and_a_damaged_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--out", "x", "--quiet", "--set", "train.rounds=1").exit_code == 0
    refused(run("--out", "x", "--quiet", "--resume", "--set", "train.seed=1"), "train.seed = 0")
    Path("x/fedavg/checkpoint.pt").write_bytes(b"noise")
    refused(run("--out", "x", "--quiet", "--resume"), "x/fedavg/checkpoint.pt")


def test_the_second_interrupt_ends_at_once() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with Interrupt(lambda: said.append("stopping")) as interrupt:
        assert not interrupt.wanted()
        signal.raise_signal(signal.SIGINT)
        assert interrupt.wanted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert said == ["stopping"]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_end_at_once_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedge.cli.run.compare", interrupted)
    monkeypatch.setattr("fedge.cli.run.find_spec", lambda name: "is there")
    result = run("--quiet", "--tensorboard")
    assert result.exit_code == 130
    assert result.stderr.splitlines() == [
        "Ended at once. The last checkpoints are in runs/small. Go on with:",
        "  fedge run --resume --out runs/small --tensorboard --no-report --quiet",
    ]


@pytest.fixture
def process(here: Path) -> Iterator[subprocess.Popen[str]]:
    """A long run of its own, past its first rounds."""
    words = ["run", "small.toml", "--no-report", "--set", "train.rounds=2000", "--set", "train.checkpoint_every=500"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", "fedge", *words], cwd=here, **pipes) as one:
        record, limit = here / "runs/small/fedavg/rounds.jsonl", time.monotonic() + 60
        while not (record.is_file() and record.stat().st_size) and time.monotonic() < limit:
            time.sleep(0.05)
        yield one
        one.kill()


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
def test_ctrl_c_stops_after_the_phase(process: subprocess.Popen[str], here: Path) -> None:
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Stopping after this phase" in err
    assert "fedge run --resume --out runs/small" in err
    rounds = len((here / "runs/small/fedavg/rounds.jsonl").read_text().splitlines())
    assert checkpoint.load(here / "runs/small/fedavg/checkpoint.pt")["round"] == rounds
    result = call("run", "--resume", "--out", "runs/small", "--no-report", "--set", f"train.rounds={rounds + 1}")
    assert f"round {rounds + 1}/{rounds + 1}" in result.stdout


# What a person sees


def test_live_bars_show_every_algorithm() -> None:
    from rich.console import Console

    console = Console(force_terminal=True, width=100, record=True, color_system=None)
    run: Any = type("Ended", (), {"stopped": False})
    with progress.Live(console, ["FedAvg [x]", "Resumed", "Later"]) as live:
        live.begin("FedAvg [x]", Progress(0, 4))
        live.round("FedAvg [x]", Progress(3, 4, 0.5, 12.3, 0.02), {})
        live.stopping()
        live.end("FedAvg [x]", Progress(4, 4, 0.75, 16.0, 0.02), run)
        live.round("Resumed", Progress(3, 4), {"round": 3})
        live.fail("Resumed", Progress(3, 4), "diverged")
    shown = console.export_text()
    for words in ("FedAvg [x]", "4/4", "acc 75.0 %", "16.0 MB", "20 ms/round", "done", "Later", "waiting", "Stopping"):
        assert words in shown
    assert "Resumed: going on after round 2" in shown
    assert "failed" in shown


def test_lines_are_about_ten(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    lines = progress.Lines(Console())
    for number in range(1, 1001):
        lines.round("x", Progress(number, 1000), {})
    assert len(capsys.readouterr().out.splitlines()) == 10


def test_small_words() -> None:
    assert [text.duration(seconds) for seconds in (7.4, 754, 3723)] == ["0:07", "12:34", "1:02:03"]
    assert [text.pace(seconds) for seconds in (0.012, 1.25, 141.3)] == ["12 ms/round", "1.2 s/round", "141 s/round"]
    assert [text.megabytes(amount) for amount in (0.04, 12345)] == ["0.0", "12,345"]
    assert [text.percent(fraction) for fraction in (None, 0.987)] == ["–", "98.7"]


# fedge report


def test_report_takes_runs_and_folders_of_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert run("--quiet").exit_code == 0
    result = call("report", "runs/small", "--open")
    assert result.exit_code == 0, result.output
    assert result.stdout == "runs/small/report.html\n"
    assert opened == [(here / "runs/small/report.html").as_uri()]
    page = (here / "runs/small/report.html").read_text()
    assert "to 5\u00a0%" in page, "the target of the experiment"
    assert page.index("fedavg") < page.index("Big steps")
    other = call("report", "runs/small/fedavg", "runs/small/big-steps", "--out", "there", "--target", "0.9")
    assert other.stdout == "there/report.html\n"
    assert "Big steps" in (here / "there/report.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere is not a folder: name a run folder"),
        (["empty"], "empty holds no run: expected a folder that `fedge run` wrote"),
        (["runs/small", "--target", "90"], "target is 90.0, it must be above 0 and at most 1"),
        (["runs/small", "--out", "page.html"], "it must be a folder"),
        (["runs/small", "--out", "small.toml/x"], "cannot write small.toml/x/figures"),
        (["runs/small", "--out", "small.toml/x"], "Not a directory; choose another place"),
    ],
)
def test_what_cannot_be_reported_gets_one_line(here: Path, words: list[str], message: str) -> None:
    (here / "empty").mkdir()
    assert run("--quiet", "--set", "train.rounds=1").exit_code == 0
    refused(call("report", *words), message)


# fedge partition show


def test_partition_show_counts_labels(here: Path) -> None:
    result = call("partition", "show", "--out", "p.png")
    assert result.exit_code == 0, result.output
    for words in (
        "100 clients, 1437 examples, 10 labels",
        "examples per client: min 13, median 14, max 16",
        "labels per client: min 2, median 2, max 2",
        "client 19",
        "The first 20 of 100 clients; --clients 100 shows all.",
        "Picture  p.png",
    ):
        assert words in result.stdout
    assert (here / "p.png").read_bytes().startswith(b"\x89PNG")
    assert not (here / "runs").exists()


def test_partition_show_takes_the_number_of_rows() -> None:
    some = call("partition", "show", "--clients", "3").stdout
    assert "client 2" in some
    assert "client 3 " not in some
    every = call("partition", "show", "--clients", "100").stdout
    assert "client 99" in every
    assert "shows all" not in every


def test_partition_show_as_json() -> None:
    result = call("partition", "show", "small.toml", "--set", "partition.clients=3", "--json")
    found = json.loads(result.stdout)
    assert found["clients"] == 3
    assert sum(map(sum, found["labels"])) == found["examples"] == 1437
    assert found["examples_per_client"] == {"min": 479, "median": 479.0, "max": 479}


def test_partition_show_leaves_labels_out_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    assert "6 more labels" in " ".join(call("partition", "show").stdout.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "partition.labels=11"], "partition: labels is 11 but y has 10 different labels"),
        (
            ["--set", "partition.kind=by_group"],
            "by_group makes one client per owner, and these data do not say",
        ),
        (["--out", "p.doc"], "cannot write p.doc"),
        (["--out", "no/p.png"], "cannot write no/p.png: No such file or directory; choose another place"),
        (["none.toml"], "there is no file none.toml"),
    ],
)
def test_partitions_that_cannot_be_shown_get_one_line(words: list[str], message: str) -> None:
    refused(call("partition", "show", *words), message)


# Help and version


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["run", "report", "partition", "--version", "Examples"]),
        (["run"], ["--set", "--out", "--resume", "--device", "--quiet", "--json", "--tensorboard", "--no-report"]),
        (["report"], ["--out", "--target", "--open", "RUN...", "Examples"]),
        (["partition"], ["show"]),
        (["partition", "show"], ["--set", "--out", "--clients", "--json", "[data]", "Examples"]),
    ],
)
def test_help_names_everything(words: list[str], expected: list[str]) -> None:
    result = call(*words, "--help")
    assert result.exit_code == 0
    for word in expected:
        assert word in result.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_list_of_commands_says_what_each_says_of_itself(command: Later) -> None:
    assert (command.load().help or "").splitlines()[0] == command.help


def test_a_wrong_command_gets_the_nearest_one_once(here: Path) -> None:
    assert call("rum").stderr.count("Did you mean 'run'?") == 1


def test_python_m_fedge_is_the_same(here: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "fedge", "--version"], capture_output=True, text=True, cwd=here)
    assert done.stdout == f"fedge {fedge.__version__}\n" == call("--version").stdout
    wrong = subprocess.run([sys.executable, "-m", "fedge", "run", "x.toml"], capture_output=True, text=True, cwd=here)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("Error: there is no file x.toml")
    assert "Traceback" not in wrong.stderr


def test_seeds_on_the_command_line_take_the_place_of_the_files_seed() -> None:
    from fedge.experiment.override import override

    assert override({"train": {"seed": 0}}, ["train.seeds=[1, 2]"])["train"] == {"seeds": [1, 2]}
    assert override({"train": {"seeds": [0, 1]}}, ["train.seed=3"])["train"] == {"seed": 3}
    both = override({"train": {}}, ["train.seed=3", "train.seeds=[1]"])["train"]
    assert both == {"seed": 3, "seeds": [1]}  # which the check of the experiment refuses


def test_a_missing_accountant_is_one_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    (here / "p.toml").write_text(
        """[data]
name = "digits"
[partition]
kind = "iid"
clients = 20
[model]
name = "mlp"
[train]
rounds = 1
cohort = 10
[algorithm]
name = "private"
clip = 1.0
noise = 1.0
expected = 10
[algorithm.inner]
name = "fedavg"
"""
    )
    result = call("run", "p.toml", "--no-report")
    assert result.exit_code == 1
    assert "Private needs dp-accounting: pip install 'fedge[private]'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("algorithm.lr=[0.1, 0.2]", "write lr = {sweep = [0.1, 0.2]}"),
        ("train.seed=[0, 1]", "write seeds = [0, 1]"),
    ],
)
def test_a_list_in_the_place_of_a_value_gets_a_hint_at_sweeps(here: Path, setting: str, remedy: str) -> None:
    assert f"; to run it with each of them, {remedy}" in " ".join(run("--set", setting).stderr.split())
    assert "to run it" not in run("--set", 'algorithm.lr=["a", "b"]').stderr


def test_sweep_with_a_file_says_what_runs_it(here: Path) -> None:
    assert "`fedge run small.toml` runs a sweep" in call("sweep", "small.toml").stderr
    (here / "runs").mkdir()
    assert "`fedge sweep show runs` shows a sweep" in call("sweep", "runs").stderr
    assert "No such command 'shw'" in call("sweep", "shw").stderr


@pytest.mark.parametrize("table", ["model", "algorithm"])
def test_an_own_part_that_is_not_there_is_said_with_its_setting(here: Path, table: str) -> None:
    (here / "mine.py").write_text("def load(): ...\n")
    said = run("--set", f"{table}.name=mine.py:Net").stderr
    assert said.startswith("Error: --set ")
    assert "there is no 'Net'" in said


def test_verbose_shows_the_remarks_of_the_log(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("fedge")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "level", log.level)
    (here / "mine.py").write_text(
        "import torch\ndef net():\n    return torch.nn.Sequential(torch.nn.Flatten(), "
        "torch.nn.Linear(64, 10), torch.nn.Softplus())\n"
    )
    words = ["--set", "model.name=mine.py:net", "--set", "train.rounds=1", "--no-report"]
    assert "clients are computed in the way" not in run(*words, "--out", "a").stderr
    assert "clients are computed in the way" in run(*words, "--verbose", "--out", "b").stderr
