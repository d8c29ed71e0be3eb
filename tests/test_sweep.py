"""Sweeps on tiny experiments: every run once, resumable anywhere, settings chosen by halving."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import fedge.data
from benchmarks.paper.places import entries, grid
from benchmarks.paper.tables import cells
from fedge.experiment import ExperimentError, build, parse
from fedge.experiment.setup import load_data
from fedge.sweep import Choices, Entry, Stopped, Store
from fedge.sweep.halving import LAST, _trial

from . import paper
from .sweeps import runner, tune


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
    with pytest.raises(ExperimentError, match=r"x\.jsonl, line 2, is not a JSON object"):
        Store(path)


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


def test_a_grid_that_is_too_large_or_missing_is_refused(tiny: Path) -> None:
    (tiny / "grid.toml").write_text("[FedAvg]\nlr = [1.0, 2.0, 3.0]\nmomentum = [0.0, 0.5, 0.9]\n")
    with pytest.raises(ExperimentError, match="9 settings for 'FedAvg', at most 8"):
        grid("FedAvg")
    with pytest.raises(ExperimentError, match="no settings for 'FedOVA'"):
        grid("FedOVA")
