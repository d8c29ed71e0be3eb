"""Sweeps in experiment files: what they expand to, how their runs go on, and what is left in the folder."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import fedge
from fedge import toml
from fedge.cli.app import app
from fedge.experiment import ExperimentError, parse, plan
from fedge.experiment.axes import sweeps
from fedge.experiment.override import override
from fedge.experiment.planning import load_sweep
from fedge.experiment.sweeps import MOST, read_sweep
from fedge.report import ReportError
from fedge.runs.experiments import records, slug
from fedge.sweep import Runner
from fedge.sweep.kept import Kept, kept_runs, run_all, state

FILE = """
name = "steps"
target = 0.3

[data]
name = "digits"

[partition]
kind = "labels_per_client"
clients = 10
labels = 3

[model]
name = "logistic"

[train]
rounds = 3
cohort = 3
device = "cpu"
seeds = [0, 1]

[[algorithm]]
name = "fedavg"
epochs = 1
lr = {sweep = [0.05, 0.1]}

[[algorithm]]
name = "fedova"
label = "OVA"
inner = {name = "fedavg", epochs = 1, lr = 0.1}
"""


def tables(*settings: str) -> dict:
    return override(tomllib.loads(FILE), settings)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.toml").write_text(FILE)
    return tmp_path


def invoke(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, list(words))
    return found.exit_code, found.output


# What a file expands to


def test_every_combination_is_a_run_of_its_own() -> None:
    runs = read_sweep(tables()).runs()
    assert [run.title for run in runs] == [
        f"{label} seed={seed}" for label in ("fedavg lr=0.05", "fedavg lr=0.1", "OVA") for seed in (0, 1)
    ]
    assert runs[3].folder == "fedavg-lr-0.1-seed-1"
    config = runs[3].config
    assert (config["algorithm"]["lr"], config["train"]["seed"], config["model"]["seed"]) == (0.1, 1, 1)
    assert config["partition"]["seed"] == 0, "the clients are the same for all seeds"
    assert parse(config).config(config["algorithm"]["label"]) == config, "each can be run again by itself"


def test_a_field_of_all_algorithms_is_swept_with_those_of_each() -> None:
    runs = read_sweep(
        tables("partition.labels={sweep = [2, 5]}", "algorithm.2.inner.lr={sweep = [0.1, 0.2, 0.4]}")
    ).runs()
    assert len(runs) == 2 * 2 * (2 + 3)
    assert len({run.folder for run in runs}) == len(runs)
    held = [run.config["partition"]["labels"] for run in runs]
    assert held == sorted(held), "what is slow to make again changes last"
    assert "OVA lr=0.4 labels=5 seed=1" in {run.title for run in runs}


def test_a_field_may_follow_the_seeds() -> None:
    runs = read_sweep(tables('partition.seed={sweep = "seeds"}')).runs()
    assert {(run.config["train"]["seed"], run.config["partition"]["seed"]) for run in runs} == {(0, 0), (1, 1)}
    assert len(runs) == 6


def test_values_that_give_one_folder_name_are_told_apart() -> None:
    runs = read_sweep(tables("model.name=mlp", "model.hidden={sweep = [[1, 2], [12]]}", "algorithm.1.lr=0.1")).runs()
    assert len({run.folder for run in runs}) == len(runs) == 8


def test_what_is_swept_may_be_a_table() -> None:
    found = read_sweep(tables('algorithm.1.optimiser={sweep = ["sgd", {name = "adam"}]}', "algorithm.1.lr=0.1")).runs()
    assert [run.label for run in found[::2]] == ["fedavg optimiser=sgd", "fedavg optimiser={'name': 'adam'}", "OVA"]


def test_a_file_without_lists_is_one_experiment() -> None:
    plain = tables("train.seeds=[3]", "algorithm.1.lr=0.1")
    del plain["train"]["seeds"]
    found = read_sweep(plain)
    assert not found.swept
    assert [run.title for run in found.runs()] == ["fedavg", "OVA"]
    assert found.table() == parse(plain).table()


def test_what_is_written_reads_back_as_the_same_runs() -> None:
    found = read_sweep(tables('partition.seed={sweep = "seeds"}'))
    again = read_sweep(tomllib.loads(toml.dump(found.table())))
    assert [run.config for run in again.runs()] == [run.config for run in found.runs()]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.seeds=[]", "train: seeds sweeps an empty list: there would be no run; give it a value or leave it out"),
        ("train.seeds=3", r"train: seeds sweeps 3, expected a list, such as \[0, 1, 2\]"),
        ("train.seeds=[1, 1]", "train: seeds has 1 twice in its list: leave one out"),
        ("train.seeds=['a']", "train: seed is 'a', expected a whole number"),
        ("train.cohort={sweep = []}", "train: cohort sweeps an empty list"),
        ("algorithm.1.lr={sweep = 0.1}", r"algorithm 1 \(fedavg\): lr sweeps 0.1, expected a list"),
        (
            "algorithm.2.inner.lr={sweep = ['x']}",
            r"algorithm 2 \(fedova\), inner \(fedavg\): lr is 'x', expected a num",
        ),
        ("algorithm.1.lr={sweep = [0.1], step = 2}", "lr is a table: sweep a field in it; beside sweep there is step"),
        ("train={sweep = [1]}", "train cannot be swept, it is a table: sweep one of its fields"),
        ("name={sweep = ['a', 'b']}", "name cannot be swept, it is of the whole sweep"),
        ("algorithm.2.inner={sweep = [1]}", "inner cannot be swept, it is an algorithm: write one"),
        ("algorithm.1.label={sweep = ['a']}", "label cannot be swept, it is a name: leave it out"),
        ("algorithm.1.epoch={sweep = [1]}", "unknown key 'epoch' "),
    ],
)
def test_every_mistake_is_named_before_anything_starts(setting: str, words: str) -> None:
    with pytest.raises(ExperimentError, match=words):
        read_sweep(tables(setting))


def test_a_seed_beside_seeds_is_refused() -> None:
    found = tables()
    found["train"]["seed"] = 4
    with pytest.raises(ExperimentError, match="train: seed is 4, and there are seeds as well: leave one of them out"):
        read_sweep(found)


def test_to_follow_seeds_there_must_be_some() -> None:
    found = tables('partition.seed={sweep = "seeds"}')
    del found["train"]["seeds"]
    with pytest.raises(ExperimentError, match=r"seed is .* and there are no seeds: add seeds to"):
        read_sweep(found)


def test_too_many_runs_are_counted_and_not_made() -> None:
    begin = time.perf_counter()
    with pytest.raises(ExperimentError, match=rf"has 3,000,000 runs .*1000 of train.seed.* at most {MOST:,} .*shorten"):
        read_sweep(tables(f"train.seeds={list(range(1000))}", f"train.rounds={{sweep = {list(range(1, 1001))}}}"))
    assert time.perf_counter() - begin < 2


def test_a_thousand_runs_are_read_in_seconds() -> None:
    begin = time.perf_counter()
    found = read_sweep(tables(f"algorithm.1.lr={{sweep = {[at / 1000 for at in range(1, 500)]}}}"))
    assert len(found.runs()) == 1000
    assert time.perf_counter() - begin < 20


def test_where_one_experiment_is_needed_a_sweep_is_refused(here: Path) -> None:
    with pytest.raises(ExperimentError, match="the file is a sweep, one experiment is needed here"):
        parse(tables())
    with pytest.raises(ExperimentError, match="steps is a sweep of 6 runs: use fedge run"):
        _ = plan(here / "steps.toml").experiment


# Runs


def test_rows_are_in_the_order_of_names_with_numbers_by_their_size(tmp_path: Path) -> None:
    names = ["fedavg-lr-0.05-seed-2", "fedavg-lr-0.05-seed-10", "fedavg-lr-0.1-seed-2", "fedprox-lr-0.05-seed-2"]
    for name in (names[at] for at in (2, 0, 3, 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rounds.jsonl").touch()
    assert [Path(row["folder"]).name for row in fedge.results(tmp_path)] == names


def test_a_sweep_ends_with_a_table_a_report_and_a_tidy_table(here: Path) -> None:
    code, said = invoke("run", "steps.toml", "--json")
    assert code == 0, said
    found = json.loads(said[said.index("\n{\n") :] if not said.startswith("{") else said)
    assert found["target"] == 0.3
    assert len(found["runs"]) == 6
    folder = here / "runs" / "steps"
    assert (folder / "report.html").is_file()
    rows = fedge.results(folder, target=0.3)
    assert {row["label"] for row in rows} == {row["label"] for row in found["runs"]}
    assert {tuple(row) for row in rows} == {tuple(rows[0])}, "all rows have the same columns"
    names = [Path(row["folder"]).name for row in rows]
    for age, name in enumerate(reversed(names)):  # as if they had begun in another order
        os.utime(folder / name / "config.toml", (age, age))
    assert [Path(row["folder"]).name for row in fedge.results(folder)] == names
    one = next(row for row in rows if row["folder"].endswith("fedavg-lr-0.1-seed-1"))
    history = records(Path(one["folder"]))
    assert (one["algorithm.lr"], one["train.seed"], one["state"], one["rounds"]) == (0.1, 1, "done", 3)
    assert one["best_accuracy"] == max(record["test_accuracy"] for record in history)
    longer = fedge.results(folder, per="round")
    assert len(longer) == 18
    assert longer[0]["megabytes"] > 0

    code, said = invoke("sweep", "show", "runs/steps")
    assert code == 0
    assert "done   OVA seed=1" in said
    assert "6 runs: 6 done" in said
    assert "±" in said


def test_several_processes_give_what_one_gives(here: Path) -> None:
    assert invoke("run", "steps.toml", "--out", "one", "--no-report")[0] == 0
    assert invoke("run", "steps.toml", "--out", "two", "--jobs", "2", "--no-report")[0] == 0
    assert _numbers(here / "one") == _numbers(here / "two")


def _numbers(folder: Path) -> dict[str, list[float]]:
    found = {path.parent.name: records(path.parent) for path in folder.glob("*/rounds.jsonl")}
    assert len(found) == 6
    return {name: [record["test_loss"] for record in history] for name, history in found.items()}


def test_one_that_fails_is_named_and_the_others_go_on(here: Path) -> None:
    settings = ["--set", "algorithm.1.lr={sweep = [1e30, 0.1]}", "--set", "train.seeds=[0]", "--set", "model.name=mlp"]
    code, said = invoke("run", "steps.toml", *settings)
    assert code == 1
    assert "fedavg lr=1e+30 seed=0 failed: round 3" in " ".join(said.split())
    rows = {row["label"]: row for row in fedge.results("runs/steps")}
    assert rows["fedavg lr=0.1"]["state"] == rows["OVA"]["state"] == "done"
    code, said = invoke("sweep", "show", "runs/steps")
    assert re.search(r"failed fedavg lr=1e\+30 seed=0, round \d of 3: round 3", said)
    assert "3 runs: 2 done, 1 failed" in said
    code, said = invoke("sweep", "show", "runs/steps", "--json")
    assert [run["state"] for run in json.loads(said)["runs"]] == ["failed", "done", "done"]


def test_a_run_that_diverged_has_no_results_in_any_table(here: Path) -> None:
    """With a huge step a linear model may still put 90 % right; its loss of 1e28 says that it failed."""
    settings = ["--set", "algorithm.1.lr={sweep = [0.05, 1e30]}", "--set", "partition={kind = 'iid', clients = 10}"]
    code, said = invoke("run", "steps.toml", *settings)
    assert code == 1
    wild = [row for row in fedge.results("runs/steps") if row["algorithm.lr"] == 1e30]
    assert [row["state"] for row in wild] == ["failed", "failed"]
    assert all(row["final_accuracy"] > 0.5 for row in wild), "it looks good"
    for table in (said, invoke("sweep", "show", "runs/steps")[1]):
        (row,) = (line for line in table.splitlines() if re.match(r"fedavg lr=1e\+30 +2 ", line))
        assert re.fullmatch(r"fedavg lr=1e\+30 +2 +failed[ –]+", row)
    page = (here / "runs" / "steps" / "report.html").read_text()
    (row,) = (
        line for line in page.splitlines() if line.startswith("<tr") and "lr=1e+30" in line and "seed" not in line
    )
    assert "2 of 2 runs failed: 3 of 3" in row
    assert re.findall(r">(\d+\.\d+)", row) == []


def test_seeds_that_failed_count_in_no_mean(here: Path) -> None:
    assert invoke("run", "steps.toml", "--no-report")[0] == 0
    rows = fedge.results("runs/steps")
    lost, kept = [row for row in rows if row["algorithm.lr"] == 0.05]
    (Path(lost["folder"]) / "failure.json").write_text(json.dumps({"failed": "it diverged"}))
    said = invoke("sweep", "show", "runs/steps")[1]
    at = next(at for at, line in enumerate(said.splitlines()) if line.startswith("fedavg lr=0.05 "))
    row, under = said.splitlines()[at : at + 2]
    assert row.split()[3] == f"{100 * kept['final_accuracy']:.1f}"
    assert "(1 failed)" in under


def test_a_run_that_failed_before_its_first_round_is_a_row(here: Path) -> None:
    settings = ["--set", "train.cohort={sweep = [3, 99]}", "--set", "train.seeds=[0]", "--set", "algorithm.1.lr=0.1"]
    code, said = invoke("run", "steps.toml", *settings)
    assert code == 1
    rows = fedge.results("runs/steps")
    lost = [row for row in rows if row["state"] == "failed"]
    assert sorted((row["train.cohort"], row["algorithm.name"]) for row in lost) == [(99, "fedavg"), (99, "fedova")]
    assert len(rows) == 4
    assert all("cohort is 99" in row["failed"] and row["rounds"] == 0 for row in lost)
    assert {row["final_accuracy"] for row in lost} == {None}
    assert re.search(r"^fedavg \(?cohort=99\)? +failed", said, re.MULTILINE)
    assert len(fedge.results("runs/steps", per="round")) == 6
    code, again = invoke("run", "--resume", "--out", "runs/steps")
    assert code == 1
    assert "cohort is 99" in again


def test_results_as_a_frame(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pandas, or what stands for it where it is not installed: it is given the rows."""
    assert invoke("run", "steps.toml", "--no-report")[0] == 0
    rows = fedge.results("runs/steps")
    if importlib.util.find_spec("pandas") is None:
        monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows: ("frame", rows)))  # type: ignore[arg-type]
        assert rows.frame() == ("frame", list(rows))
    else:
        frame = rows.frame()
        assert list(frame.columns) == list(rows[0])
        assert frame["final_accuracy"].tolist() == [row["final_accuracy"] for row in rows]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ReportError, match=r"frame\(\) needs pandas: pip install pandas"):
        rows.frame()


def test_folders_keep_the_signs_of_numbers() -> None:
    assert [slug(f"fedavg lr={lr} seed={seed}") for lr, seed in ((1e30, -1), (1e-30, 1), (0.1, 0))] == [
        "fedavg-lr-1e+30-seed--1",
        "fedavg-lr-1e-30-seed-1",
        "fedavg-lr-0.1-seed-0",
    ]
    assert slug("C++, a + b = c - 1e-5") == "c-a-b-c-1e-5"


def test_an_error_of_any_kind_is_one_runs_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = kept_runs(read_sweep(tables("train.seeds=[0]", "algorithm.1.lr=0.1")))

    def broken(*args: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("fedge.algorithms.fedova.FedOVA.round", broken)
    seen: dict[str, str | None] = {}
    run_all(Runner(here / "out", "cpu"), runs, lambda run, line: seen.update({run.title: line["failed"]}))
    assert seen == {"fedavg seed=0": None, "OVA seed=0": "ZeroDivisionError: by nothing"}
    assert state(here / "out", runs[1]).why == "ZeroDivisionError: by nothing"
    monkeypatch.undo()
    run_all(Runner(here / "out", "cpu"), runs[1:], lambda run, line: seen.update({run.title: line["failed"]}))
    assert state(here / "out", runs[1]).word == "done"
    assert not (here / "out" / runs[1].folder / "failure.json").exists()


def test_data_and_clients_are_made_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(
        "fedge.sweep.runner.load_data", _counted(calls, "data", Runner.__init__.__globals__["load_data"])
    )
    monkeypatch.setattr("fedge.sweep.runner.deal", _counted(calls, "clients", Runner.__init__.__globals__["deal"]))
    runs = kept_runs(read_sweep(tables("train.rounds=1", "partition.labels={sweep = [2, 5]}")))
    run_all(Runner(here / "out", "cpu"), runs, lambda run, line: None)
    assert calls == ["data", "clients", "clients"]


def _counted(calls: list[str], name: str, function: Callable[..., object]) -> Callable[..., object]:
    def counted(*args: object) -> object:
        calls.append(name)
        return function(*args)

    return counted


def test_what_no_run_can_do_is_said_before_the_first(here: Path) -> None:
    code, said = invoke("run", "steps.toml", "--set", "algorithm.1.lr={sweep = [0.1, -1]}")
    assert (code, "lr is -1, it must be greater than 0" in said) == (2, True)
    assert not (here / "runs" / "steps" / "experiment.toml").exists()
    code, said = invoke("run", "steps.toml", "--set", "train.cohort=11")
    assert (code, "cohort is 11, but there are only 10 clients" in said) == (2, True)


def test_a_sweep_that_was_killed_goes_on_where_it_was(here: Path) -> None:
    """kill -9 of the command: its processes end by themselves, and the same numbers come out in the end."""
    settings = ["--set", "train.rounds=40", "--set", "train.checkpoint_every=4", "--no-report"]
    words = [sys.executable, "-m", "fedge", "run", "steps.toml", "--jobs", "2", "--out", "killed", *settings]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(list(here.glob("killed/*/summary.json"))) < 1:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _wait_until_free(here / "killed")
    runs = kept_runs(load_sweep(here / "killed" / "experiment.toml"))
    words_ = [state(here / "killed", run).word for run in runs]
    assert "done" in words_
    assert set(words_) - {"done"}, "nothing was left to do: kill earlier"
    code, said = invoke("run", "--resume", "--out", "killed", "--jobs", "2", "--no-report")
    assert code == 0, said
    assert f"{words_.count('done')} done before" in said
    assert invoke("run", "steps.toml", "--out", "whole", *settings)[0] == 0
    assert _numbers(here / "killed") == _numbers(here / "whole")


def _wait_until_free(folder: Path) -> None:
    """Until no process writes any more: those of a command that was killed notice it within moments."""
    sizes: list[int] = []
    for _ in range(100):
        now = [path.stat().st_size for path in sorted(folder.glob("*/rounds.jsonl"))]
        if now == sizes:
            return
        sizes = now
        time.sleep(1)
    raise AssertionError("processes still write")


def test_ctrl_c_says_how_to_go_on(here: Path) -> None:
    words = [sys.executable, "-m", "fedge", "run", "steps.toml", "--set", "train.rounds=4000", "--no-report"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size for path in here.glob("runs/steps/*/rounds.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "fedge run --resume --out runs/steps" in said
    assert state(here / "runs" / "steps", kept_runs(load_sweep(here / "steps.toml"))[0]).word == "begun"


def test_more_rounds_go_on_from_what_is_there(here: Path) -> None:
    assert invoke("run", "steps.toml", "--no-report", "--set", "train.seeds=[0]")[0] == 0
    before = _history(here)
    assert invoke("run", "--resume", "--out", "runs/steps", "--no-report", "--set", "train.rounds=5")[0] == 0
    assert len(_history(here)) == 5
    assert _history(here)[:3] == before, "with the seconds of the first rounds: they were not repeated"


def _history(here: Path) -> list[dict]:
    return records(here / "runs" / "steps" / "ova-seed-0")


def test_algorithms_of_a_plain_file_may_run_side_by_side(here: Path) -> None:
    settings = ["--set", "algorithm.1.lr=0.1", "--set", "train.seeds=[0]"]
    assert invoke("run", "steps.toml", "--jobs", "2", "--no-report", *settings)[0] == 0
    assert {path.parent.name for path in here.glob("runs/steps/*/summary.json")} == {"fedavg-seed-0", "ova-seed-0"}


def test_two_commands_do_not_work_in_one_folder(here: Path) -> None:
    from fedge.sweep.runner import locked

    with locked(here / "runs" / "steps"):
        code, said = invoke("run", "steps.toml")
    assert (code, "another process is at work in runs/steps" in said) == (2, True)


def test_results_of_a_folder_without_runs(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="holds no run: name a folder that"):
        fedge.results(tmp_path)
    with pytest.raises(ReportError, match="per is 'step', it must be 'run' or 'round'"):
        fedge.results(tmp_path, per="step")  # type: ignore[arg-type]


def test_a_run_of_a_sweep_travels_to_a_process() -> None:
    import pickle

    run = kept_runs(read_sweep(tables()))[0]
    assert pickle.loads(pickle.dumps(run)) == run
    assert isinstance(run, Kept)
    assert sweeps(tables())
