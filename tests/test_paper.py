"""The paper's files, tables, claims and page: made from what is stored, and saying what it does not support."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks import kill_reproduce
from benchmarks.paper import measured, page, places, superseded
from benchmarks.paper.claims import claims
from benchmarks.paper.figures import _curve, draw, limits
from benchmarks.paper.places import DATASETS, EXPERIMENTS, entries, grid
from benchmarks.paper.runs import of_the_paper, shown
from benchmarks.paper.tables import NOT_RUN, NOTHING, cells, spread, table
from benchmarks.paper.tuned import dips, falls, tuning
from benchmarks.readme import with_part
from fedge.experiment import ExperimentError, build, parse
from fedge.experiment.setup import load_data
from fedge.sweep import Choices, Entry, Store
from fedge.sweep.entries import innermost, with_setting
from fedge.sweep.files import MOST, scope
from fedge.sweep.halving import TRIALS

from .facts import names, numbers
from .sweeps import FILES, facts, fake, row, said

SPEAKERS = 1794  # of the key words' training set: who they are, not a field, gives the number of clients


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_file_is_an_experiment_with_its_cells_in_the_paper(name: str, dataset: str) -> None:
    both = ["fmnist", "kws"]
    only = {"batch-epochs": ["fmnist"], "server-step": ["cifar10"], "standardised": ["cifar10"]}
    only |= {"splits": both, "acting": both}
    if dataset not in only.get(name, [dataset]):
        assert entries(name, dataset, [0]) == []
        return
    wanted = entries(name, dataset, [0, 1])
    assert {entry.seed for entry in wanted} == {0, 1}
    for entry in wanted:
        assert ("Clipped" in entry.label) == (innermost(entry.config["algorithm"]).get("clip") is not None)
        clients = entry.config["partition"].get("clients", SPEAKERS)
        assert parse(entry.config).train["cohort"] == round(clients / 5)
        assert grid(entry.method)
        if name not in ("curves", "batch-epochs", *places.BEYOND):
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
        elsewhere = ("product",) if dataset == "cifar10" else ("server step", "standardised")
        here = [one for one in listed if not any(word in one.lower() for word in elsewhere)]
        assert {entry.method for entry in tuned} == set(here)
        assert all(entry.config["data"]["validation"] == 0.1 and entry.rounds == 120 for entry in tuned)


SETTING = {
    "fmnist": ("fashion_mnist", "fmnist_cnn"), "cifar10": ("cifar10", "vgg11"), "kws": ("speech_commands", "kws_cnn"),
}  # fmt: skip


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_files_have_the_paper_s_setting(dataset: str) -> None:
    """K = 100, E = 5, B = 15 and so on, unless the cell or the label says otherwise."""
    data, model = SETTING[dataset]
    for name in (*(one for one in EXPERIMENTS if one != "splits"), "tune"):
        for entry in entries(name, dataset, [0]):
            config = entry.config
            assert (config["data"]["name"], config["model"]["name"]) == (data, model), entry
            long = {"kws": 250 if name == "optimisers" else 200, "cifar10": 100}.get(dataset, 200)
            assert entry.rounds == (120 if name == "tune" else long), entry
            part = entry.cell.partition("-")[2].removeprefix("standardised-")
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


@pytest.mark.parametrize("dataset", ["fmnist", "kws"])
def test_other_splits_have_the_paper_s_setting_but_for_the_split(dataset: str) -> None:
    wanted = {"iid": ("iid", None), "dirichlet0.1": ("dirichlet", 0.1), "dirichlet0.5": ("dirichlet", 0.5)}
    paper = {entry.label: entry.config for entry in entries("noniid", dataset, [0]) if entry.cell.endswith("l2")}
    every = entries("splits", dataset, [0])
    found = [entry for entry in every if entry.cell != "kws-speakers"]
    assert {entry.cell for entry in found} == {f"{dataset}-{name}" for name in wanted}
    for entry in (one for one in every if one not in found):
        assert (entry.config["partition"]["kind"], entry.config["model"]["name"]) == ("by_group", "kws_cnn")
    for entry in found:
        partition = entry.config["partition"]
        assert (partition["kind"], partition.get("alpha")) == wanted[entry.cell.split("-", 1)[1]]
        assert partition["clients"] == 100
        for part in ("data", "model", "train", "algorithm"):
            assert entry.config[part] == paper[entry.label][part], entry


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
    assert list(shown(store, choices)) == [name for name in EXPERIMENTS if name not in places.BEYOND]
    store.add(fake(clipped, 0.8))
    (group,) = shown(store, choices)["clipped"]
    assert group[0].dataset == "kws"


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
    which, otherwise = superseded._if_better(now, store)
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
    for path, text in page.pages().items():
        assert text == path.read_text("utf-8")
        pictures = re.findall(r"\]\((images/.*?)\)", text)
        assert [name for name in pictures if not (page.PAGE.parent / name).is_file()] == []
    assert page.readme() == page.README.read_text("utf-8")


def test_the_page_lists_what_fell(tmp_path: Path) -> None:
    store = Store(tmp_path / "results.jsonl")
    entry = next(entry for entry in entries("optimisers", "fmnist", [1]) if entry.label == "Fisher L-BFGS")
    head = {"experiment": entry.experiment, "cell": entry.cell, "label": entry.label, "seed": 1, "config": entry.config}
    line = fake(entry, 0.1) | head | {"rounds": 200, "test_accuracy": [0.8, 0.1, 0.9, 0.3, 0.2, None]}
    assert numbers(falls(store)) == []
    store.add(line)
    assert names(falls(store)) == ["Fisher L-BFGS"]
    assert numbers(falls(store)) == [0.1, 1, 90.0, 4, 20.0], "step, seed; the best, since when; at the end"


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
    every = of_the_paper(shown(store, choices))
    listed = [str(one) for group in every for one in claims(group, store)]
    counted = int(re.findall(r"Of (\d+) claims", page.counted(every, store, ""))[0])
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
    part = found.split("## Table III")[1].split("\n## ")[0]
    _, method, paper, ours, target, *_ = row(part, "Fashion-MNIST, l = 2")
    assert (method, paper, target) == ("FedOVA", "89.4", "85 %")
    assert numbers(ours) == [90.0, 1, 3], "one of three seeds"
    assert part.count("\n| ") == 3, "head, line and one row: no row for a cell that was not run"
    assert "images/paper-noniid.png" in found
    assert "images/paper-optimisers.png" not in found
    assert NOT_RUN not in found, "said in one line"
    assert "Not run: " in " ".join(found.split())
    assert "all of KWS" in " ".join(found.split())
    assert "a machine, fp32" in page.pages()[page.SETTINGS]


def test_the_page_says_when_a_choice_was_of_another_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    for method, settings in (("FedAvg", grid("FedAvg")[:2]), ("FedOVA", [*grid("FedOVA")[:1], {"lr": 7.0}])):
        trials = [{"setting": setting, "rounds": 60, "validation": 0.9} for setting in settings]
        choice = {"kind": "choice", "dataset": "fmnist", "method": method, "rounds": 60, "setting": settings[0]}
        Store(tmp_path / "tune.jsonl").add({**choice, "key": method, "trials": trials})
    rows = {row.split(" | ")[0]: row for row in page.pages()[page.SETTINGS].split("## Tuning")[1].splitlines()}
    assert "lr 0.02 (90.0 %, next 90.0; 2 settings, 60 rounds) |" in rows["| FedAvg"]
    assert "lr 0.02 (90.0 %, next 90.0, of an earlier grid, 60 rounds) |" in rows["| FedOVA"]


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


def test_the_same_run_in_two_tables_is_one_run() -> None:
    def key(name: str, cell: str, label: str) -> str:
        (found,) = (entry.key for entry in entries(name, "fmnist", [0]) if (entry.cell, entry.label) == (cell, label))
        return found

    one = key("noniid", "fmnist-l2", "FedOVA")
    assert one == key("curves", "fmnist", "FedOVA") == key("sharing", "fmnist", "FedOVA")
    assert one == key("clients", "fmnist-k100", "FedOVA") == key("batch-epochs", "fmnist-batch", "FedOVA, B = 15")
    others = [entry.key for entry in entries("noniid", "fmnist", [0, 1])]
    assert len(set(others)) == len(others)


@pytest.mark.parametrize("lr", [1, 1.0, 0.1])
def test_another_setting_gives_the_key_of_a_run_with_it(lr: float) -> None:
    """Also where a number is whole in one and not in the other."""
    for start in (1, 0.3):
        one, other = (entries("noniid", "fmnist", [0], ranked=lambda *_, lr=at: [{"lr": lr}]) for at in (start, lr))
        assert [with_setting(entry, {"lr": lr}).key for entry in one] == [entry.key for entry in other]


def test_a_folder_without_experiments_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGE_PAPER", str(tmp_path))
    with pytest.raises(ExperimentError, match=r"FEDGE_PAPER is .* without paper\.toml"):
        entries("noniid", "fmnist", [0])
