"""`fedge reproduce` on a tiny stand-in: every run once, resumable anywhere, tables from what is stored."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

import fedge.data
from benchmarks import kill_reproduce
from benchmarks.paper import measured, page, places
from benchmarks.paper.claims import claims
from benchmarks.paper.figures import _curve, draw, limits
from benchmarks.paper.places import DATASETS, EXPERIMENTS, entries, grid
from benchmarks.paper.tables import NOT_RUN, NOTHING, cells, spread, table
from benchmarks.paper.tuned import dips, falls, tuning
from benchmarks.readme import with_part
from fedge import sweep
from fedge.cli.app import app
from fedge.cli.listener import outcome
from fedge.experiment import ExperimentError, build, parse
from fedge.experiment.setup import load_data
from fedge.sweep import Choices, Entry, Runner, Stopped, Store
from fedge.sweep.entries import innermost, with_setting
from fedge.sweep.files import MOST, scope
from fedge.sweep.halving import LAST, TRIALS, _trial
from fedge.sweep.hardware import hardware
from fedge.sweep.runner import Listener, locked

from . import paper
from .facts import names, numbers

FILES = Path(__file__).parents[1] / "benchmarks" / "paper"


class Counting(Listener):
    def __init__(self) -> None:
        self.rounds: list[str] = []

    def round(self, entry: Entry, record: dict) -> None:
        self.rounds.append(f"{entry} {record['round']}")


def runner(out: Path, stop: Callable[[], bool] = lambda: False) -> Runner:
    return Runner(out, "cpu", stop=stop, listener=Counting())


def tune(runner: Runner, dataset: str, **options: Any) -> list[dict]:
    return sweep.tune(runner, places.files(), dataset, **options)


def test_a_folder_without_experiments_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGE_PAPER", str(tmp_path))
    with pytest.raises(ExperimentError, match=r"FEDGE_PAPER is .* without paper\.toml"):
        entries("noniid", "fmnist", [0])


# The real files


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_file_is_an_experiment_with_its_cells_in_the_paper(name: str, dataset: str) -> None:
    if (name, dataset) in (("batch-epochs", "cifar10"), ("batch-epochs", "kws")):
        assert entries(name, dataset, [0]) == []
        return
    wanted = entries(name, dataset, [0, 1])
    assert {entry.seed for entry in wanted} == {0, 1}
    for entry in wanted:
        assert ("Clipped" in entry.label) == (innermost(entry.config["algorithm"]).get("clip") is not None)
        assert parse(entry.config).train["cohort"] * 5 == entry.config["partition"]["clients"]
        assert grid(entry.method)
        if name not in ("curves", "batch-epochs", "clipped"):
            assert places.stated(name, entry.cell, entry.label)[0] is not None


def test_every_cell_of_the_paper_has_a_run() -> None:
    for name in EXPERIMENTS:
        stated = {(cell, label) for cell, row in places.paper().get(name, {}).items() for label in row}
        ours = {(entry.cell, entry.label) for dataset in DATASETS for entry in entries(name, dataset, [0])}
        assert stated <= ours, name


def test_every_method_has_the_same_budget_and_is_tuned_without_the_test_set() -> None:
    listed = tomllib.loads((FILES / "grid.toml").read_text())
    assert {len(grid(method)) for method in listed} == {MOST}
    for dataset in DATASETS:
        tuned = entries("tune", dataset, [0])
        assert {entry.method for entry in tuned} == set(listed)
        assert all(entry.config["data"]["validation"] == 0.1 and entry.rounds == 120 for entry in tuned)


SETTING = {
    "fmnist": ("fashion_mnist", "fmnist_cnn"), "cifar10": ("cifar10", "vgg11"), "kws": ("speech_commands", "kws_cnn"),
}  # fmt: skip


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_files_have_the_paper_s_setting(dataset: str) -> None:
    """K = 100, E = 5, B = 15 and so on, unless the cell or the label says otherwise."""
    data, model = SETTING[dataset]
    for name in (*EXPERIMENTS, "tune"):
        for entry in entries(name, dataset, [0]):
            config = entry.config
            assert (config["data"]["name"], config["model"]["name"]) == (data, model), entry
            long = 250 if (dataset, name) == ("kws", "optimisers") else 200
            assert entry.rounds == (120 if name == "tune" else long), entry
            _, _, part = entry.cell.partition("-")
            assert config["partition"]["clients"] == (int(part[1:]) if part[:1] == "k" else 100), entry
            iid = name == "optimisers" or part == "iid"
            labels = int(part[1:]) if part[:1] == "l" else 2
            assert config["partition"].get("labels") == (None if iid else labels), entry
            inner = innermost(config["algorithm"])
            said = dict(re.findall(r"(B|E) = (\w+)", entry.label))
            wanted = {"15": 15, "50": 50, "100": 100, "all": None}[said.get("B", "15")]
            assert (inner["batch_size"], inner["epochs"]) == (wanted, int(said.get("E", "5"))), entry
            averaged = str(config["algorithm"]).count("'name': 'averaged'")
            assert averaged == (0 if iid or "plain" in entry.label else 1), entry
            assert not averaged or "'window': 20" in str(config["algorithm"]), entry
            if "sharing" in entry.label:
                assert config["algorithm"]["beta"] == float(entry.label.split()[2]) / 100, entry


def test_the_paper_s_numbers() -> None:
    """Read off the paper once more, table by table: F-MNIST, CIFAR-10, KWS."""
    stated = places.paper()
    assert [[*row.values()] for row in stated["sharing"].values()] == [
        [86.3, 88.1, 89.4], [65.3, 67.5, 67.8], [82.6, 83.5, 84.6],
    ]  # fmt: skip
    assert [[*row.values()] for row in stated["clients"].values()] == [
        [84.3, 89.4], [83.1, 88.9], [63.5, 67.8], [61.2, 66.3], [80.5, 84.6], [75.9, 82.4],
    ]  # fmt: skip
    assert [[*row.values()] for row in stated["noniid"].values()] == [
        [84.3, 89.4], [85.8, 90.3], [89.9, 91.7], [63.5, 67.8], [66.3, 69.1], [72.5, 73.2],
        [80.5, 84.6], [82.4, 86.4], [86.0, 89.2],
    ]  # fmt: skip
    assert [[*row.values()] for row in stated["optimisers"].values()] == [
        [[98.2, 200], [98.1, 200], [97.8, 150], [97.5, 50]],
        [[79.2, 200], [77.9, 200], [75.9, 125], [78.6, 75]],
        [[94.4, 250], [92.8, 250], [94.3, 200], [93.1, 100]],
    ]


def test_tuning_sees_a_part_of_the_training_set_and_nothing_of_the_test_set(tiny: Path) -> None:
    entry = entries("tune", "fmnist", [0])[0]
    held = build(parse(entry.config), load_data(entry.config["data"])).federation.data
    whole = load_data({**entry.config["data"], "validation": 0.0})
    known = {tuple(one) for one in whole.test_x.flatten(1).tolist()}
    assert len(held.train_y) + len(held.test_y) == len(whole.train_y)
    assert len(held.test_y) == pytest.approx(entry.config["data"]["validation"] * len(whole.train_y), rel=0.2)
    train = {tuple(one) for one in whole.train_x.flatten(1).tolist()}
    assert all(tuple(one) in train for one in held.test_x.flatten(1).tolist())
    assert sum(tuple(one) in known - train for one in held.test_x.flatten(1).tolist()) == 0
    other = replace(entry, config=entry.config | {"data": entry.config["data"] | {"validation": 0.0}})
    assert other.key != entry.key


def test_the_same_run_in_two_tables_is_one_run() -> None:
    def key(name: str, cell: str, label: str) -> str:
        (found,) = (entry.key for entry in entries(name, "fmnist", [0]) if (entry.cell, entry.label) == (cell, label))
        return found

    one = key("noniid", "fmnist-l2", "FedOVA")
    assert one == key("curves", "fmnist", "FedOVA") == key("sharing", "fmnist", "FedOVA")
    assert one == key("clients", "fmnist-k100", "FedOVA") == key("batch-epochs", "fmnist-batch", "FedOVA, B = 15")
    others = [entry.key for entry in entries("noniid", "fmnist", [0, 1])]
    assert len(set(others)) == len(others)


# Runs


def test_a_finished_run_is_not_repeated(tiny: Path, tmp_path: Path) -> None:
    first = runner(tmp_path / "out")
    wanted = entries("noniid", "fmnist", [0], rounds=2)
    lines = [first.run(entry) for entry in wanted]
    assert len(first.listener.rounds) == 4 * 2
    again = runner(tmp_path / "out")
    assert [again.run(entry) for entry in wanted] == lines
    assert again.listener.rounds == []
    assert not list((tmp_path / "out" / "runs").iterdir())
    other = runner(tmp_path / "out")
    other.run(next(entry for entry in entries("clients", "fmnist", [0], rounds=2) if entry.cell == "fmnist-k20"))
    assert other.listener.rounds == []  # the same run, in another table


def test_a_line_has_all_that_a_number_needs(tiny: Path, tmp_path: Path) -> None:
    entry = entries("optimisers", "fmnist", [3])[0]
    line = runner(tmp_path).run(entry)
    stored = json.loads((tmp_path / "results.jsonl").read_text())
    assert stored == line
    assert line["seed"] == line["config"]["train"]["seed"] == line["config"]["partition"]["seed"] == 3
    assert len(line["test_accuracy"]) == len(line["train_accuracy"]) == line["rounds"] == 4
    assert line["final_accuracy"] == line["test_accuracy"][-1]
    for name in ("versions", "hardware", "seconds_a_round", "up_bytes", "down_bytes", "setup_bytes", "engine"):
        assert line[name] is not None, name
    direct = parse(line["config"])
    assert direct.train["rounds"] == 4


def test_stopping_anywhere_and_going_on_gives_the_same_lines(tiny: Path, tmp_path: Path) -> None:
    wanted = entries("noniid", "fmnist", [0])
    whole = runner(tmp_path / "whole")
    for entry in wanted:
        whole.run(entry)
    asked, ends = 0, 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked % 7 == 0

    for _ in range(100):
        cut = runner(tmp_path / "cut", stop)
        try:
            for entry in wanted:
                cut.run(entry)
        except Stopped:
            ends += 1
        else:
            break
    assert ends > 2
    assert paper.untimed(tmp_path / "cut" / "results.jsonl") == paper.untimed(tmp_path / "whole" / "results.jsonl")


def test_data_are_loaded_once(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []
    real = fedge.data.load

    def counted(*args: object, **options: object) -> fedge.data.Data:
        loads.append(args)
        return real(*args, **options)

    monkeypatch.setattr("fedge.experiment.setup.load", counted)
    one = runner(tmp_path)
    for entry in entries("noniid", "fmnist", [0, 1], rounds=1):
        one.run(entry)
    assert len(loads) == 1


def test_a_run_that_diverges_is_a_result(tiny: Path, tmp_path: Path) -> None:
    wild = entries("noniid", "fmnist", [0], ranked=lambda dataset, method: [{"lr": 1e30}])[0]
    line = runner(tmp_path).run(wild)
    assert "no good" in line["failed"] or "finite" in line["failed"]
    again = runner(tmp_path)
    assert again.run(wild)["failed"] == line["failed"]
    assert "(1 of 1 diverged)" in cells([wild], again.store)["FedAvg"]["fmnist-l2"].text()


def test_a_torn_last_line_is_cut_off_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"key": "a"}\n{"key": "b", "acc')
    store = Store(path)
    assert store.lines == [{"key": "a"}]
    store.add({"key": "c"})
    assert [line["key"] for line in Store(path).lines] == ["a", "c"]
    path.write_text('{"key": "a"}\nnonsense\n{"key": "b"}\n')
    with pytest.raises(ExperimentError, match=r"x\.jsonl, line 2, is not JSON"):
        Store(path)


# Tuning


def test_halving_tries_every_setting_and_keeps_the_better_half(tiny: Path, tmp_path: Path) -> None:
    one = runner(tmp_path)
    choices = tune(one, "fmnist", rounds=8)
    assert [line["method"] for line in choices] == ["FedAvg", "FedOVA", "FedDANE"]
    for line in choices:
        tried = {1: [], 3: [], 8: []}
        for trial in line["trials"]:
            tried[trial["rounds"]].append(trial)
        assert [len(trials) for trials in tried.values()] == [4, 2, 1]
        assert [trial["setting"] for trial in tried[1]] == grid(line["method"])
        for short, long in ((1, 3), (3, 8)):
            better = sorted(tried[short], key=lambda trial: -trial["validation"])[: len(tried[long])]
            assert [trial["setting"] for trial in better] == [trial["setting"] for trial in tried[long]]
        assert line["setting"] == tried[8][0]["setting"]
    assert len(one.listener.rounds) == 3 * (4 * 1 + 2 * 2 + 1 * 5)  # a longer trial goes on from the shorter one
    assert not list((tmp_path / "runs").iterdir())
    again = runner(tmp_path)
    assert tune(again, "fmnist", rounds=8) == choices
    assert again.listener.rounds == []


def test_tuning_that_was_stopped_chooses_the_same(tiny: Path, tmp_path: Path) -> None:
    wanted = tune(runner(tmp_path / "whole"), "fmnist", rounds=8)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked % 9 == 0

    for _ in range(100):
        try:
            found = tune(runner(tmp_path / "cut", stop), "fmnist", rounds=8)
            break
        except Stopped:
            continue
    assert found == wanted


def test_what_was_chosen_is_used(tiny: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    Store(first).add({"kind": "choice", "key": "1", "dataset": "fmnist", "method": "FedAvg", "setting": {"lr": 0.7}})
    for lr in (0.3, 0.2):  # the later counts
        line = {"kind": "choice", "dataset": "fmnist", "setting": {"lr": lr, "lr_decay": 0.5}}
        Store(second).add({**line, "key": f"2{lr}", "method": "FedAvg"})
        Store(second).add({**line, "key": f"3{lr}", "method": "FedOVA"})
    chosen = Choices([first, second, tmp_path / "missing.jsonl"])
    found = {entry.label: entry.config["algorithm"] for entry in entries("noniid", "fmnist", [0], ranked=chosen)}
    assert found["FedAvg"]["inner"]["lr"] == 0.7
    assert found["FedOVA"]["inner"]["inner"]["lr"] == 0.2
    assert found["FedOVA"]["inner"]["inner"]["lr_decay"] == 0.5
    (batch,) = entries("batch-epochs", "fmnist", [0], ranked=chosen)
    assert batch.config["algorithm"]["inner"]["inner"]["lr"] == 0.2


def test_a_short_trial_does_not_decide_over_whole_runs(tmp_path: Path) -> None:
    own, published = tmp_path / "own.jsonl", tmp_path / "published.jsonl"
    line = {"kind": "choice", "dataset": "fmnist", "method": "FedAvg"}
    Store(published).add({**line, "key": "p", "rounds": 60, "setting": {"lr": 0.1}})
    Store(own).add({**line, "key": "s", "rounds": 1, "setting": {"lr": 0.9}})
    assert Choices([own, published])("fmnist", "FedAvg")[0] == {"lr": 0.1}
    Store(own).add({**line, "key": "l", "rounds": 60, "setting": {"lr": 0.2}})
    Store(own).add({**line, "key": "t", "rounds": 1, "setting": {"lr": 0.8}})
    assert Choices([own, published])("fmnist", "FedAvg")[0] == {"lr": 0.2}


def test_clipping_is_judged_beside_the_paper_and_beside_no_clipping(tmp_path: Path) -> None:
    store, wanted = Store(tmp_path / "results.jsonl"), entries("clipped", "fmnist", [0])
    finals = {"FedAvg": 0.8, "FedOVA": 0.85, "Clipped FedAvg": 0.79, "Clipped FedOVA": 0.9}
    for entry in wanted:
        if entry.cell == "fmnist-l2":
            store.add(fake(entry, finals[entry.label]))
    assert facts(wanted, store) == [
        (["fmnist-l2", "FedOVA", "paper"], [89.4, 90.0], True),
        (["fmnist-l2", "FedOVA", "FedAvg"], [90.0, 79.0], True),
        (["fmnist-l2", "Clipped FedAvg", "FedAvg"], [79.0, 80.0], False),
        (["fmnist-l2", "Clipped FedOVA", "FedOVA"], [90.0, 85.0], True),
    ]
    assert ["clipped" in line for line in said(wanted, store)] == [True, True, False, False]


def test_the_page_shows_what_goes_beyond_the_paper_once_it_was_run(tmp_path: Path) -> None:
    store, choices = Store(tmp_path / "results.jsonl"), Choices([])
    wanted = entries("clipped", "kws", [0])
    plain, clipped = (next(entry for entry in wanted if entry.label == label) for label in ("FedOVA", "Clipped FedOVA"))
    store.add(fake(plain, 0.8))  # that of Table III
    assert list(page.shown(store, choices)) == [name for name in EXPERIMENTS if name != "clipped"]
    store.add(fake(clipped, 0.8))
    (group,) = page.shown(store, choices)["clipped"]
    assert group[0].dataset == "kws"


def test_a_field_that_came_later_leaves_the_keys_of_runs_alone() -> None:
    entry = next(entry for entry in entries("noniid", "fmnist", [0]) if entry.label == "FedOVA")
    inner = innermost(entry.config["algorithm"])
    assert inner["clip"] is None
    before = entry.key
    inner["clip"] = 2.0
    assert entry.key != before
    del inner["clip"]
    assert entry.key == before
    lines = Store(FILES / "results" / "results.jsonl").lines
    older = [line for line in lines if "clip" not in innermost(line["config"]["algorithm"])]
    assert {replace(entry, config=line["config"]).key for line in older} == {line["key"] for line in older}


def test_a_choice_for_one_cell_is_used_there_alone(tmp_path: Path) -> None:
    store = Store(tmp_path / TRIALS)
    line = {"kind": "choice", "dataset": "fmnist", "method": "FedOVA"}
    store.add({**line, "key": "a", "rounds": 120, "setting": {"lr": 0.7}})
    store.add({**line, "key": "b", "rounds": 120, "setting": {"lr": 0.3}, "cell": "fmnist-k1000"})
    store.add({**line, "key": "c", "rounds": 8, "setting": {"lr": 0.9}, "cell": "fmnist-k100"})
    found = entries("clients", "fmnist", [0], ranked=Choices([store.path]))
    used = {entry.cell: innermost(entry.config["algorithm"])["lr"] for entry in found if entry.label == "FedOVA"}
    assert used == {"fmnist-k100": 0.7, "fmnist-k1000": 0.3}, "a choice after fewer rounds does not count"


def test_the_many_clients_are_tuned_alone() -> None:
    for dataset, cell in (("fmnist", "fmnist-k1000"), ("cifar10", "cifar10-k1000"), ("kws", "kws-k500")):
        tuned = [entry for entry in entries("tune", dataset, [0]) if scope(entry.cell) != dataset]
        assert {(scope(entry.cell), entry.method) for entry in tuned} == {(cell, "FedAvg"), (cell, "FedOVA")}
        there = [entry for entry in entries("clients", dataset, [0]) if entry.cell == cell]
        for one, other in zip(tuned, there, strict=True):
            for part in ("partition", "model", "algorithm"):
                assert one.config[part] == other.config[part]


def test_a_tuning_of_one_cell_says_so(tiny: Path, tmp_path: Path) -> None:
    text = (tiny / "tune" / "fmnist-noniid.toml").read_text("utf-8")
    (tiny / "tune" / "fmnist-l3.toml").write_text(text, "utf-8")
    tune(runner(tmp_path), "fmnist", rounds=8, only=["FedOVA"])
    lines = [line for line in Store(tmp_path / TRIALS).lines if line.get("kind") == "choice"]
    assert {line.get("cell") for line in lines} == {None, "fmnist-l3"}
    again = CliRunner().invoke(app, ["reproduce", "tune", "--plan", "--rounds", "8", "--out", str(tmp_path)])
    assert "done   tune fmnist-l3, FedOVA" in again.output
    assert "to do  tune fmnist-l3, FedAvg" in again.output


def test_the_score_of_a_trial_is_that_of_its_last_rounds(tiny: Path, tmp_path: Path) -> None:
    class Fake:
        def run(self, entry: Entry, store: Store, folder: str) -> dict:
            return {"failed": None, "test_accuracy": [0.1] * 20 + [0.5] * LAST}

    assert _trial(Fake(), Store(tmp_path / "x"), entries("tune", "fmnist", [0])[0], 60) == 0.5
    Fake.run = lambda *_: {"failed": "it diverged", "test_accuracy": [1.0] * 20}
    assert _trial(Fake(), Store(tmp_path / "x"), entries("tune", "fmnist", [0])[0], 60) == 0.0


def test_a_line_that_was_cut_just_before_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"key": "a"}\n{"key": "b"}')
    store = Store(path)
    store.add({"key": "c"})
    assert [line["key"] for line in Store(path).lines] == ["a", "b", "c"]


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


def test_a_run_that_collapsed_diverged(tmp_path: Path) -> None:
    store = Store(tmp_path / "results.jsonl")
    run = {"key": "a", "rounds": 200, "failed": None, "final_accuracy": 0.58, "best_accuracy": 0.9}
    for key, changed in {
        "fell late": {"test_accuracy": [0.9, 0.9, 0.1]}, "fell, unseen since": {"test_accuracy": [0.9, 0.1, None]},
        "rose": {"test_accuracy": [0.9, 0.1, 0.46]}, "short": {"rounds": 99, "test_accuracy": [0.9, 0.9, 0.1]},
        "unseen": {"test_accuracy": [], "best_accuracy": None},
    }.items():  # fmt: skip
        store.add({**run, "key": key, **changed})
    store.add({"key": "failed", "rounds": 200, "failed": "values are not finite"})
    lost = [line["key"] for line in store.lines if store.diverged(line["key"])]
    assert lost == ["fell late", "fell, unseen since", "failed"]
    assert not store.diverged("never run")


def test_no_claim_rests_on_a_run_that_collapsed(tiny: Path, tmp_path: Path) -> None:
    store, wanted = Store(tmp_path / "results.jsonl"), entries("noniid", "fmnist", [0], 200)
    whole = Store(tmp_path / "whole.jsonl")
    for entry in wanted:
        line = fake(entry, 0.6) | {"rounds": 200}
        whole.add(line)
        store.add(line | ({"test_accuracy": [0.9, 0.1], "best_accuracy": 0.9} if entry.label == "FedAvg" else {}))
    assert "(1 of 1 diverged)" in cells(wanted, store)["FedAvg"]["fmnist-l2"].text()
    assert sum("FedAvg" in names(claim.said) for claim in claims(wanted, whole)) == 3
    assert not [claim for claim in claims(wanted, store) if claim.holds and "FedAvg" in names(claim.said)]


def test_a_run_that_collapsed_is_said_so() -> None:
    line = {"rounds": 200, "failed": None, "final_accuracy": 0.1, "best_accuracy": 0.9, "seconds_a_round": 1.0}
    fell = {**line, "test_accuracy": [0.9, 0.1]}
    assert numbers(outcome(fell)) == [10.0, 200, 90.0, 1], "accuracy, rounds, the best, seconds per round"
    assert "collapsed" in outcome(fell)
    assert "collapsed" not in outcome({**line, "test_accuracy": [0.9, 0.8]})


def test_one_method_alone(tiny: Path, tmp_path: Path) -> None:
    options = ["--dataset", "fmnist", "--seeds", "1", "--rounds", "1", "--device", "cpu", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["reproduce", "noniid", "clients", *options, "--method", "FedAvg"])
    assert done.exit_code == 0, done.output
    assert "FedOVA" not in done.output
    wrong = CliRunner().invoke(app, ["reproduce", "noniid", *options, "--method", "FedAgv"])
    assert wrong.exit_code == 2
    assert "did you mean 'FedAvg'" in wrong.output


def test_a_grid_that_is_too_large_or_missing_is_refused(tiny: Path) -> None:
    (tiny / "grid.toml").write_text("[FedAvg]\nlr = [1.0, 2.0, 3.0]\nmomentum = [0.0, 0.5, 0.9]\n")
    with pytest.raises(ExperimentError, match="9 settings for 'FedAvg', at most 8"):
        grid("FedAvg")
    with pytest.raises(ExperimentError, match="no settings for 'FedOVA'"):
        grid("FedOVA")


# Tables


def facts(wanted: list[Entry], store: Store) -> list[tuple[list[str], list[float], bool | None]]:
    """The names and numbers of every claim, and whether it holds."""
    return [(names(claim.said), numbers(claim.said), claim.holds) for claim in claims(wanted, store)]


def row(text: str, *start: str) -> list[str]:
    """The cells of the one row of a table that starts with these."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    (found,) = [cells for cells in rows if cells[: len(start)] == list(start)]
    return found


def said(wanted: list[Entry], store: Store) -> list[str]:
    return [str(claim) for claim in claims(wanted, store)]


def fake(entry: Entry, accuracy: float, **more: object) -> dict:
    return {
        "key": entry.key,
        "experiment": entry.experiment,
        "cell": entry.cell,
        "label": entry.label,
        "seed": entry.seed,
        "failed": None,
        "final_accuracy": accuracy,
        "final_train_accuracy": accuracy,
        "test_accuracy": [0.1, accuracy],
        "train_accuracy": [0.1, accuracy],
        "rounds": 2,
        "up_bytes": 3e6,
        "down_bytes": 3e6,
        "setup_bytes": 2e6,
        "seconds_a_round": 0.5,
        "hardware": "a machine",
        "engine": {"precision": "fp32"},
        **more,
    }


def test_a_table_shows_both_numbers_and_says_what_is_missing(tiny: Path, tmp_path: Path) -> None:
    store, wanted = Store(tmp_path / "x.jsonl"), entries("noniid", "fmnist", [0, 1])
    for entry in wanted:
        if entry.cell == "fmnist-l2" and entry.label == "FedAvg":
            store.add(fake(entry, 0.5 + 0.1 * entry.seed))
        if entry.cell == "fmnist-l5" and entry.label == "FedOVA" and entry.seed == 0:
            store.add(fake(entry, 0.8))
    text = table(wanted, store)
    head = [[*names(cell), "ours" in cell] for cell in text.splitlines()[0].split(" | ")[1:]]
    assert head == [["l = 2", "paper", False], ["l = 2", True], ["l = 5", "paper", False], ["l = 5", True]]
    assert row(text, "FedAvg") == ["FedAvg", "10.0", "55.0 ± 7.1", NOTHING, NOT_RUN]
    *first, last = row(text, "FedOVA")
    assert first == ["FedOVA", "99.0", NOT_RUN, NOTHING]
    assert numbers(last) == [80.0, 1, 2], "one of two seeds"
    details = measured.details(wanted, store)
    _, _, setting, rounds, moved, dropped, seconds, where = row(details, "fmnist-l2", "FedAvg")
    assert numbers(setting) == [0.1, 1, 20], "lr, epochs, batch size"
    assert "not tuned" in setting
    assert (rounds, numbers(moved), numbers(dropped)) == ("4", [2.0, 0.0, 2.0], [0, 0])
    assert (numbers(seconds), where) == ([0.5, 0.0], "a machine, fp32")
    assert row(details, "fmnist-l5", "FedAvg")[-1] == NOT_RUN


def test_a_table_of_which_the_paper_states_nothing_has_no_column_for_it(tmp_path: Path) -> None:
    wanted = entries("clipped", "fmnist", [0])
    text = table(wanted, Store(tmp_path / "x.jsonl"))
    assert names(text.splitlines()[0]) == ["l = 2", "l = 3", "l = 5"]
    assert row(text, "Clipped FedOVA")[1:] == [NOT_RUN] * 3


def test_the_table_of_optimisers_has_rounds_to_targets(tiny: Path, tmp_path: Path) -> None:
    store, wanted = Store(tmp_path / "x.jsonl"), entries("optimisers", "fmnist", [0, 1])
    for entry in wanted:
        store.add(fake(entry, 0.5 if entry.seed else 0.15))
    _, accuracy, rounds, test, train, to_test, to_train = row(table(wanted, store), "FedAvg")
    assert (accuracy, rounds, test, train) == ("98.2", "200", "32.5 ± 24.7", "32.5 ± 24.7")
    assert (numbers(to_test), numbers(to_train)) == ([2, 1, 2], []), "one of two seeds; none"


def test_a_figure_has_where_its_curves_end_and_when_they_get_there(tiny: Path, tmp_path: Path) -> None:
    store, wanted = Store(tmp_path / "x.jsonl"), entries("batch-epochs", "fmnist", [0])
    assert row(table(wanted, store), "fmnist") == ["fmnist", "FedOVA, B = 20", NOT_RUN, NOT_RUN]
    store.add(fake(wanted[0], 0.5))
    assert row(table(wanted, store), "fmnist") == ["fmnist", "FedOVA, B = 20", "50.0", "2"]


def test_claims_are_judged(tiny: Path, tmp_path: Path) -> None:
    store, wanted = Store(tmp_path / "x.jsonl"), entries("clients", "fmnist", [0])
    accuracy = {("fmnist-k20", "FedAvg"): 0.5, ("fmnist-k20", "FedOVA"): 0.61, ("fmnist-k40", "FedOVA"): 0.60}
    for entry in wanted:
        if (entry.cell, entry.label) in accuracy:
            store.add(fake(entry, accuracy[entry.cell, entry.label]))
    assert facts(wanted, store) == [
        (["fmnist-k20", "FedOVA", "paper"], [60.0, 61.0], True),
        (["fmnist-k20", "FedOVA", "FedAvg"], [61.0, 50.0], True),
        (["fmnist-k40", "FedOVA", "paper"], [59.5, 60.0], True),
        (["fmnist-k40", "FedOVA", "paper", "fmnist-k20"], [0.5, 1.0], False),
    ]


def test_what_was_run_before_a_cell_was_tuned_is_shown_and_nothing_is_claimed(tiny: Path, tmp_path: Path) -> None:
    """With the choice for the whole data set, until there are runs with that of the cell."""
    store, seeds = Store(tmp_path / "x.jsonl"), [0, 1]
    before = {"fmnist": [{"lr": 0.3}]}
    now = before | {"fmnist-k40": [{"lr": 0.7}]}

    def ranked(choices: dict) -> Any:
        return lambda cell, method: choices.get(cell, choices["fmnist"])

    for entry in entries("clients", "fmnist", seeds, ranked=ranked(before)):
        store.add(fake(entry, 0.6, config=entry.config))
    wanted = entries("clients", "fmnist", seeds, ranked=ranked(now))
    assert [entry.instead_of != "" for entry in wanted] == [entry.cell == "fmnist-k40" for entry in wanted]
    old = row(table(wanted, store), "FedOVA")[-1]
    assert numbers(old) == [60.0, 0.0, 0.3, 0.7], "the result, the step it was made with, the step that was not run"
    assert NOT_RUN in old
    assert facts(wanted, store)[-2:] == [
        (["fmnist-k40", "FedOVA", "FedAvg"], numbers(old), None),
        (["fmnist-k40", "FedOVA", "paper", "fmnist-k20"], [0.5, *numbers(old)], None),
    ]
    assert all(line.endswith(old) for line in said(wanted, store)[-2:]), "why"
    details = [line.split(" | ") for line in measured.details(wanted, store).splitlines()[2:]]
    assert [cells[3] for cells in details if numbers(cells[2]) == [0.3]] == ["4", "4"], "with the step before"
    for entry in wanted:
        if store.find(entry.key) is None:
            store.add(fake(entry, 0.61, config=entry.config))
    assert row(table(wanted, store), "FedOVA")[-1] == "61.0 ± 0.0"


def test_settings_that_are_not_used_any_more_are_shown_seed_by_seed(tmp_path: Path) -> None:
    def with_lr(
        lr: float, name: str = "noniid", seeds: tuple[int, ...] = (0, 1), rounds: int | None = None
    ) -> list[Entry]:
        return entries(name, "fmnist", seeds, rounds, lambda cell, method: [{"lr": lr}])

    store, now = Store(tmp_path / "x.jsonl"), with_lr(0.2)
    for entry in [
        *with_lr(0.2, seeds=(0, 1, 2)),
        *with_lr(0.1, rounds=3),
    ]:  # a seed more, and shorter runs: neither counts
        store.add(fake(entry, 0.7, config=entry.config))
    assert (measured.others(now, store), measured.better(now, store)) == ("", now)
    for entry in with_lr(0.28, "curves"):  # two of them are Table III's too, with two labels
        fell = {"rounds": 200, "test_accuracy": [0.8, 0.1]} if entry.seed else {"dropped": 4}
        store.add(fake(entry, 0.1 if entry.seed else 0.8, config=entry.config, **fell))
    for entry in with_lr(0.05):
        store.add(fake(entry, 0.72 if entry.label == "FedAvg" else 0.68, config=entry.config))
    failed = fake(with_lr(0.03)[0], 0.0, config=with_lr(0.03)[0].config, failed="no upload is finite")
    store.add({name: value for name, value in failed.items() if "accuracy" not in name})
    rows = [line.strip("| ").split(" | ") for line in measured.others(now, store).splitlines()[2:]]
    assert len(rows) == 9
    assert [cells[:2] for cells in rows[:3]] == [["fmnist-l2", "FedAvg"]] * 3
    assert [[numbers(cell) for cell in cells[2:]] for cells in rows[:3]] == [
        [[0.03, 5, 15], [0], [0]],  # the setting, every seed and its accuracy, what was dropped
        [[0.05, 5, 15], [0, 72.0, 1, 72.0], [0, 0]],
        [[0.28, 5, 15], [0, 80.0, 1, 10.0], [4, 0]],
    ]
    assert [cells[3].count("diverged") for cells in rows[:3]] == [1, 0, 1]
    assert rows[2][3].index("diverged") > rows[2][3].index("10.0")
    best = [innermost(entry.config["algorithm"])["lr"] for entry in measured.better(now, store)]
    assert best == [0.05 if entry.label == "FedAvg" else 0.2 for entry in now]
    which, otherwise = page._if_better(now, store)
    cells_of_it = [f"fmnist-l{n}" for n in (2, 3, 5)]
    assert names(which) == [name for cell in cells_of_it for name in (cell, "FedAvg")]
    assert numbers(which) == [0.05] * 3
    assert [names(line) for line in otherwise.splitlines()] == [[cell, "FedOVA", "FedAvg"] for cell in cells_of_it]
    assert numbers(otherwise) == [70.0, 72.0] * 3
    assert otherwise.count("not hold") == 3
    assert numbers(dips(store)) == []
    (failed,) = [line for line in falls(store).splitlines() if "no upload is finite" in line]
    assert (names(failed), numbers(failed)) == (["fmnist-l2", "FedAvg"], [0.03, 0])


def test_a_choice_at_the_edge_of_its_grid_has_a_star(tmp_path: Path) -> None:
    store = Store(tmp_path / TRIALS)
    for method, setting in (("FedOVA", {"lr": 0.28}), ("FedAvg", {"lr": 0.1}), ("FedDANE", {"lr": 0.02, "mu": 0.1})):
        trials = [{"setting": one, "rounds": 120, "validation": 0.5} for one in grid(method)]
        line = {"kind": "choice", "key": method, "dataset": "kws", "method": method, "rounds": 120}
        store.add(line | {"setting": setting, "trials": trials})
    shown = tuning(Choices([store.path]))
    for chosen in (
        "lr 0.28\\* (50.0 %, next 50.0)",
        "lr 0.1 (50.0 %, next 50.0)",
        "lr 0.02\\*, mu 0.1 (50.0 %, next 50.0)",
    ):
        assert f"| {chosen} |" in shown


@pytest.mark.parametrize("lr", [1, 1.0, 0.1])
def test_another_setting_gives_the_key_of_a_run_with_it(lr: float) -> None:
    """Also where a number is whole in one and not in the other."""
    for start in (1, 0.3):
        one, other = (entries("noniid", "fmnist", [0], ranked=lambda *_, lr=at: [{"lr": lr}]) for at in (start, lr))
        assert [with_setting(entry, {"lr": lr}).key for entry in one] == [entry.key for entry in other]


def test_late_dips_that_are_no_divergence_are_listed(tmp_path: Path) -> None:
    entry, store = entries("noniid", "fmnist", [0])[0], Store(tmp_path / "x.jsonl")
    assert numbers(dips(store)) == []
    early = [0.8] * 49 + [0.1] + [0.8] * 150  # swings while it is young, up to round 50
    small = [0.8] * 100 + [0.721] * 100
    gone = [0.8] * 100 + [0.1] * 100  # diverged: listed elsewhere
    back: list[float | None] = [0.7, 0.8] * 50 + [0.3, None, 0.2, 0.5] + [0.75, None] * 48
    late = [0.4] * 50 + [0.2] + [0.8] * 50 + [0.5] + [0.8] * 98  # the largest fall in points, not in parts
    first = [0.8] * 50 + [0.719] + [0.8] * 149
    for curve in (early, small, gone, back, late, first):
        store.add(fake(entry, 0.8, config=entry.config, rounds=200, test_accuracy=curve))
    found = dips(store).splitlines()
    assert [names(line) for line in [*found, falls(store)]] == [["fmnist-l2", "FedAvg"]] * 4
    assert [numbers(line) for line in found] == [  # lr, seed; from, to, by which round; at the end
        [0.1, 0, 80.0, 20.0, 103, 75.0],
        [0.1, 0, 80.0, 50.0, 102, 80.0],
        [0.1, 0, 80.0, 71.9, 51, 80.0],
    ]
    assert numbers(falls(store)) == [0.1, 0, 80.0, 101, 10.0], "lr, seed; the best, since when; at the end"


def test_seeds_that_are_far_apart_are_named_and_a_loss_is_judged_by_them(tmp_path: Path) -> None:
    wanted, store = entries("clients", "fmnist", [0, 1, 2]), Store(tmp_path / "x.jsonl")
    for entry in wanted:
        apart = (0.0, 0.02, 0.1)[entry.seed] if (entry.cell, entry.label) == ("fmnist-k1000", "FedOVA") else 0.0
        store.add(fake(entry, 0.9 - apart))
    found, far = facts(wanted, store), [90.0, 88.0, 80.0]
    near = [(names(claim.said), claim.is_near) for claim in claims(wanted, store)]
    assert (["fmnist-k100", "FedOVA", "paper"], [89.4, 90.0], True) in found
    assert (["fmnist-k1000", "FedOVA", "paper"], [88.9, 86.0, *far], False) in found
    assert (["fmnist-k1000", "FedOVA", "paper"], True) in near
    assert found[-1] == (["fmnist-k1000", "FedOVA", "paper", "fmnist-k100"], [0.5, 4.0, *far], False)
    assert near[-1][1]


@pytest.mark.parametrize(("gain", "holds"), [(0.02, True), (0.04, False)])
def test_what_fewer_labels_cost_is_compared(tmp_path: Path, gain: float, holds: bool) -> None:
    wanted, store = entries("noniid", "fmnist", [0]), Store(tmp_path / "x.jsonl")
    for entry in wanted:
        more = entry.cell == "fmnist-l5"
        store.add(fake(entry, 0.8 + more * (gain if entry.label == "FedOVA" else 0.03)))
    who = ["fmnist-l2", "FedOVA", "FedAvg", "fmnist-l5", "FedOVA", "FedAvg"]
    assert facts(wanted, store)[-1] == (who, [100 * gain, 3.0], holds)
    some = Store(tmp_path / "some.jsonl")
    for entry in wanted:
        if entry.cell != "fmnist-l5":
            some.add(fake(entry, 0.8))
    assert len(said(wanted, store)) == 7
    assert len(said(wanted, some)) == 4
    assert not any("fewer labels" in line for line in said(wanted, some))


def test_a_curve_that_has_not_come_to_its_end_is_said_to_rise(tmp_path: Path) -> None:
    wanted = entries("batch-epochs", "fmnist", [0])
    flat, rising = [0.8] * 20 + [0.804] * 20, [0.8] * 20 + [0.806] * 20
    seldom = [value for one in rising for value in (None, one)]  # evaluated every second round
    for number, (curve, expected) in enumerate(((flat, []), (rising, ["B = all"]), (seldom, ["B = all"]))):
        store = Store(tmp_path / f"{number}.jsonl")
        for entry in wanted:
            store.add(fake(entry, 0.8) | {"test_accuracy": curve if "all" in entry.label else flat})
        claim = claims(wanted, store)[0]
        sizes = ["B = 15", "B = 50", "B = 100", "B = all"]
        assert names(claim.said) == [*sizes, *expected]
        assert ("rising" in claim.said, claim.holds) == (bool(expected), True)


def test_a_rival_that_still_rises_is_named(tmp_path: Path) -> None:
    wanted, store = entries("noniid", "kws", [0]), Store(tmp_path / "x.jsonl")
    for entry in wanted:
        last = 0.75 if entry.label == "FedAvg" else 0.9
        store.add(fake(entry, last) | {"test_accuracy": [0.7 if entry.label == "FedAvg" else 0.9] * 20 + [last] * 20})
    assert facts(wanted, store)[:2] == [
        (["kws-l2", "FedOVA", "paper"], [84.6, 90.0], True),
        (["kws-l2", "FedOVA", "FedAvg", "FedAvg"], [90.0, 75.0], True),
    ]
    assert ["rising" in line for line in said(wanted, store)[:2]] == [False, True]


def test_a_claim_says_on_what_it_rests(tiny: Path, tmp_path: Path) -> None:
    store, wanted = Store(tmp_path / "x.jsonl"), entries("noniid", "fmnist", [0, 1])
    here = [entry for entry in wanted if entry.cell == "fmnist-l2"]
    for entry in here:
        if entry.seed == 0:
            store.add(fake(entry, 0.995))
    assert facts(wanted, store) == [
        (["fmnist-l2", "FedOVA", "paper"], [99.0, 99.5, 1, 2], True),
        (["fmnist-l2", "FedOVA", "FedAvg"], [99.5, 99.5, 1, 2], False),
    ]
    assert all("so far" in line for line in said(wanted, store))
    for entry in here:
        if entry.seed == 1:
            store.add({**fake(entry, 0.5), "failed": "it diverged"})
    assert facts(wanted, store)[0] == (["fmnist-l2", "FedOVA", "paper"], [99.0, 99.5, 1], None)
    assert "diverged" in said(wanted, store)[0]


def series(entry: Entry, accuracy: float, rounds: int) -> dict:
    """A run that reaches its accuracy at a round."""
    curve = [0.1] * (rounds - 1) + [accuracy] * (30 - rounds)
    return fake(entry, accuracy) | {"test_accuracy": curve, "train_accuracy": curve}


def test_the_figure_s_observations_are_judged(tmp_path: Path) -> None:
    """Of the real files: the same end for every B and E, and later with fewer local steps."""
    wanted = entries("batch-epochs", "fmnist", [0])
    late = {"B = 15": 5, "B = 50": 9, "B = 100": 12, "B = all": 20, "E = 5": 5, "E = 3": 9, "E = 1": 20}
    for end, holds in ((0.0, True), (0.05, False)):
        store = Store(tmp_path / f"{end}.jsonl")
        for entry in wanted:
            name = entry.label.split(", ")[-1]
            store.add(series(entry, 0.9 - end * (name in ("B = all", "E = 1")), late[name]))
        assert [claim.holds for claim in claims(wanted, store)] == [holds, True, holds, True]
    early = Store(tmp_path / "early.jsonl")
    for entry in wanted:
        early.add(series(entry, 0.9, 25 - late[entry.label.split(", ")[-1]]))
    assert [claim.holds for claim in claims(wanted, early)] == [True, False, True, False]


def test_rounds_to_a_target_are_compared(tmp_path: Path) -> None:
    wanted, store = entries("optimisers", "fmnist", [0]), Store(tmp_path / "x.jsonl")
    for entry in wanted:
        store.add(series(entry, 0.99, 10 if entry.label == "Fisher L-BFGS" else 20))
    assert facts(wanted, store) == [
        (["Fisher L-BFGS", base], [target, 10, 20], True)
        for base in ("FedAvg-SGD", "FedAvg-Adam", "FedDANE")
        for target in (90, 97.5)
    ]
    assert ["train" in line for line in said(wanted, store)] == [False, True] * 3


def test_rounds_that_overlap_or_that_nobody_has_are_said_to(tmp_path: Path) -> None:
    wanted = entries("optimisers", "fmnist", [0, 1, 2])
    mixed, none = Store(tmp_path / "mixed.jsonl"), Store(tmp_path / "none.jsonl")
    for entry in wanted:
        mixed.add(series(entry, 0.99, 10 + 3 * entry.seed + 5 * (entry.label == "FedAvg-SGD")))
        none.add(series(entry, 0.5, 10))
    assert facts(wanted, mixed)[0] == (["Fisher L-BFGS", "FedAvg-SGD"], [90, 13, 18], True)
    assert facts(wanted, none)[0] == (["Fisher L-BFGS", "FedAvg-SGD"], [90], None)
    assert said(wanted, none)[0].count("never") == 2
    assert all(claims(wanted, store)[0].is_near for store in (mixed, none))


@pytest.mark.parametrize(("reached", "rounds"), [(2, [10, 20]), (1, [20]), (0, [20])])
def test_a_seed_that_never_gets_there_counts_as_late(tmp_path: Path, reached: int, rounds: list[float]) -> None:
    wanted, store = entries("optimisers", "fmnist", [0, 1, 2]), Store(tmp_path / "x.jsonl")
    for entry in wanted:
        ours = entry.label == "Fisher L-BFGS"
        store.add(series(entry, 0.5 if ours and entry.seed >= reached else 0.99, 10 if ours else 20))
    claim = claims(wanted, store)[0]
    assert numbers(claim.said) == [90, *rounds]
    assert claim.said.count("never") == 2 - len(rounds)
    assert claim.holds == (reached == 2)


def test_figures_show_what_there_is(tiny: Path, tmp_path: Path) -> None:
    store, wanted = Store(tmp_path / "x.jsonl"), entries("noniid", "fmnist", [0, 1])
    assert draw(wanted, store, tmp_path / "none.png") is None
    store.add(fake(wanted[0], 0.5))
    picture = draw(wanted, store, tmp_path / "some.png")
    assert picture is not None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_long_title_is_broken_to_the_width_of_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    monkeypatch.setattr(Figure, "suptitle", lambda self, text, **_: titles.append(text))
    store, wanted = Store(tmp_path / "x.jsonl"), entries("sharing", "kws", [0])
    store.add(fake(wanted[0], 0.5))
    draw(wanted, store, tmp_path / "some.png")
    assert "sharing data" in titles[0]
    assert max(map(len, titles[0].splitlines())) < 70 < len(titles[0])


def test_a_figure_shows_the_ends_of_all_its_curves() -> None:
    low, high = limits(np.array([10.0] + [60.0] * 30 + [90.0]))
    assert 50 <= low < 60
    assert 90 < high <= 100


def test_spread_of_one_seed_is_its_value() -> None:
    assert (spread([1.25], 1), spread([1.0, 2.0], 1)) == ("1.2", "1.5 ± 0.7")


# The command


def invoke(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["reproduce", *words])
    return found.exit_code, found.output


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
    assert "round 1 of 4" not in text, "a line a minute"
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


def test_a_curve_shows_its_seeds_and_the_paper_s_value() -> None:
    axes = Figure().subplots()
    shown = _curve(axes, "FedOVA", [[0.5, 0.6], [0.7, 0.8]], 1, 70.0)
    ours, theirs = axes.get_lines()
    assert ours.get_label() == "FedOVA (2 seeds)"
    assert ours.get_ydata().tolist() == pytest.approx([60, 70])
    assert set(theirs.get_ydata()) == {70.0}
    assert (theirs.get_linestyle(), theirs.get_color()) == (":", ours.get_color())
    assert shown.tolist() == pytest.approx([60, 70, 70]), "the axis has to reach it"
    assert len(_curve(axes, "FedAvg", [[0.5]], 1, None)) == 1
    assert len(axes.get_lines()) == 3


def test_the_page_says_what_was_stored() -> None:
    """If not: `python -m benchmarks.paper`."""
    assert page.text() == page.PAGE.read_text("utf-8")
    assert page.readme() == page.README.read_text("utf-8")
    pictures = re.findall(r"\]\((images/.*?)\)", page.text())
    assert [name for name in pictures if not (page.PAGE.parent / name).is_file()] == []


def test_the_page_lists_what_fell(tmp_path: Path) -> None:
    store = Store(tmp_path / "results.jsonl")
    entry = next(entry for entry in entries("optimisers", "fmnist", [1]) if entry.label == "Fisher L-BFGS")
    head = {"experiment": entry.experiment, "cell": entry.cell, "label": entry.label, "seed": 1, "config": entry.config}
    line = fake(entry, 0.1) | head | {"rounds": 200, "test_accuracy": [0.8, 0.1, 0.9, 0.3, 0.2, None]}
    assert numbers(page.falls(store)) == []
    store.add(line)
    assert names(page.falls(store)) == ["Fisher L-BFGS"]
    assert numbers(page.falls(store)) == [0.1, 1, 90.0, 4, 20.0], "step, seed; the best, since when; at the end"


def test_a_data_set_may_be_called_as_everywhere_else() -> None:
    options = ("--plan", "--out", "/nowhere", "--seeds", "1")
    assert invoke("noniid", "--dataset", "fashion_mnist", *options) == invoke("noniid", "--dataset", "fmnist", *options)


def test_a_small_difference_is_said_to_be_one(tmp_path: Path) -> None:
    wanted, store = entries("noniid", "fmnist", [0, 1]), Store(tmp_path / "x.jsonl")
    finals = {"FedAvg": (0.90, 0.91), "FedOVA": (0.91, 0.92)}
    for entry in wanted:
        if entry.cell == "fmnist-l2":
            store.add(fake(entry, finals[entry.label][entry.seed]))
    assert facts(wanted, store) == [
        (["fmnist-l2", "FedOVA", "paper"], [89.4, 91.5], True),
        (["fmnist-l2", "FedOVA", "FedAvg"], [91.5, 90.5], True),
    ]
    assert [claim.is_near for claim in claims(wanted, store)] == [False, True]


def test_a_claim_of_two_tables_counts_once() -> None:
    store, choices = Store(page.FOLDER / "results.jsonl"), Choices([page.FOLDER / TRIALS])
    every = [group for name, groups in page.shown(store, choices).items() for group in groups if name != "clipped"]
    listed = [str(one) for group in every for one in claims(group, store)]
    counted = int(re.findall(r"Of (\d+) claims", page.verdicts(every, store))[0])
    twice = [one for one in listed if "k100:" in one]
    assert twice
    assert counted <= len(listed) - len(twice)


def test_what_is_killed_at_random_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small copy of the experiments in benchmarks.kill_reproduce fits the digits that it is run on."""
    monkeypatch.setenv("FEDGE_PAPER", str(kill_reproduce.files(tmp_path / "paper")))
    for name in kill_reproduce.NAMES:
        for entry in entries(name, "fmnist", [0]):
            assert entry.config["data"]["name"] == "digits"
            assert build(parse(entry.config), load_data(entry.config["data"])).federation.clients >= 100


def test_a_part_of_the_readme_needs_its_marks() -> None:
    assert "\nnew\n<!-- /paper -->\n" in with_part("paper", "new\n")
    with pytest.raises(ValueError, match="put the two lines back"):
        with_part("nothing", "new\n")


def test_the_page_follows_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result appears beside the paper's number, with its figure and its hardware; the rest says "not run"."""
    entry = next(one for one in entries("noniid", "fmnist", [0]) if one.label == "FedOVA")
    Store(tmp_path / "results.jsonl").add(fake(entry, 0.9))
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    found = page.text()
    rows = [line.strip("| ").split(" | ") for line in found.splitlines() if line.startswith("| FedOVA | 89.4 | 90.0")]
    (cells,) = [cells for cells in rows if len(cells) == 7]  # two labels, three and five
    assert numbers(cells[2]) == [90.0, 1, 3], "one of three seeds"
    assert cells[3:] == ["90.3", NOT_RUN, "91.7", NOT_RUN]
    assert "images/paper-noniid-fmnist.png" in found
    assert "images/paper-noniid-kws.png" not in found
    assert "a machine, fp32" in found


def test_the_page_says_when_a_choice_was_of_another_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    for method, settings in (("FedAvg", grid("FedAvg")[:2]), ("FedOVA", [*grid("FedOVA")[:1], {"lr": 7.0}])):
        trials = [{"setting": setting, "rounds": 60, "validation": 0.9} for setting in settings]
        choice = {"kind": "choice", "dataset": "fmnist", "method": method, "rounds": 60, "setting": settings[0]}
        Store(tmp_path / "tune.jsonl").add({**choice, "key": method, "trials": trials})
    rows = {row.split(" | ")[0]: row for row in page.text().split("## Tuning")[1].splitlines()}
    assert "lr 0.02 (90.0 %, next 90.0) |" in rows["| FedAvg"]
    assert "lr 0.02 (90.0 %, next 90.0, of an earlier grid, 60 rounds) |" in rows["| FedOVA"]


# Where the paper is found


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
