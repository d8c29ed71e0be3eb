"""The diet's benchmark: its rows can be run, go on where they were, and its page says what is stored."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import fedge
from benchmarks.diet import __main__ as command
from benchmarks.diet import measure, page, tune
from benchmarks.diet.methods import METHODS, PROBLEMS


def test_the_page_says_what_is_stored() -> None:
    """If not: `python -m benchmarks.diet --page`."""
    text = page.PAGE.read_text("utf-8")
    assert page.text(text, measure.lines()) == text


def test_a_short_run_is_kept_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "ROUNDS", 1)
    monkeypatch.setattr(measure, "METHODS", [method for method in METHODS if method.bits == 32][:4])
    arguments = ["diet", "digits", "--rounds", "2", "--seeds", "0", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    command.main()
    found = measure.lines(tmp_path)
    assert [line["method"] for line in found] == [method.name for method in measure.METHODS]
    assert all(len(line["accuracy"]) == len(line["bytes"]) == 2 for line in found)
    command.main()
    assert len(measure.lines(tmp_path)) == len(found), "what is stored is not run again"
    monkeypatch.setattr(sys, "argv", [*arguments, "--seeds", "1", "--seconds", "0"])
    command.main()
    assert len(measure.lines(tmp_path)) == len(found), "no time: nothing is begun"


def test_every_method_can_be_built_for_every_problem() -> None:
    for problem in PROBLEMS.values():
        for method in METHODS:
            assert isinstance(method.build(problem, 0), fedge.Algorithm)


def line(**more: object) -> dict:
    """Four rounds of ten bytes; round 2 and 4 calibrated at five bytes more."""
    plain = {"bytes": [10, 15, 10, 15], "calibration_bytes": [0, 5, 0, 5], "accuracy": [0.2, 0.9, 0.6, 0.8]}
    return {**plain, "calibrated_every": 2, "rounds": 4, "failed": None, "lr": 0.5, **more}


def test_calibration_stands_apart() -> None:
    one = line()
    assert page.spent(one) == [10, 20, 30, 40]
    assert page.curve(one) == [0.2, None, 0.6, None]
    assert (page.final(one), page.calibrated(one)) == (0.4, 0.8)
    assert page.at_bytes(one, 25) == 0.2, "two rounds are paid, one of them is not calibrated"
    assert page.to_target(one, 0.5) == 30
    assert page.to_target(one, 0.7) is None, "only with calibration"
    assert page.calibrated(line(calibrated_every=None)) is None


def test_the_table_has_what_was_run() -> None:
    runs = [
        line(problem="digits", method=method, seed=seed, rounds=50)
        for method in ("FedAvg", "SharedOVA")
        for seed in (0, 1)
    ]
    runs.append(line(problem="digits", method="FedOVA", seed=0, rounds=50, failed="it diverged"))
    rows = [row.strip("| ").split(" | ") for row in page.table("digits", json.loads(json.dumps(runs))).splitlines()]
    assert [row[0] for row in rows[2:]] == ["FedAvg", "SharedOVA"]
    assert rows[2][1] == "2"
    assert rows[2][2] == "0.5"
    assert rows[2][4:6] == ["40.0 ± 0.0", "80.0 ± 0.0"]
    assert page.table("kws", runs) == "Not run yet."


def test_the_answer_compares_the_cheapest_of_both() -> None:
    def run(method: str, each: int) -> dict:
        return line(
            problem="digits", method=method, seed=0, rounds=50, bytes=[each] * 4, calibration_bytes=[0] * 4,
            accuracy=[0.2, 0.9, 0.9, 0.9], calibrated_every=None,
        )  # fmt: skip

    runs = [run("FedAvg", 10_000_000), run("FedAvg, half width", 4_000_000), run("FedOVA", 20_000_000)]
    assert "FedOVA, needs 40.0 MB; the cheapest FedAvg (FedAvg, half width) 8.0, FedAvg as it is 20.0" in _flat(runs)
    assert "FedOVA is behind" in _flat(runs)
    assert "FedOVA is ahead" in _flat([*runs, run("FedOVA, quarter width", 1_000_000)])
    assert page.answer(runs[:2]) == "", "nothing to compare"
    better = [*runs, run("FedOVA, quarter width", 1_000_000)]
    assert "On digits: yes, with FedOVA, quarter width. Open: Fashion-MNIST, KWS, which were not run." in _flat(better)
    assert "there is no such diet" in _flat([*better, run("FedAvg + server step", 500_000)])


def test_every_diet_of_fedova_has_its_fedavg() -> None:
    diets = {kind: {(one.width, one.bits) for one in METHODS if one.kind == kind} for kind in ("avg", "ova", "shared")}
    assert diets["ova"] <= diets["avg"]
    assert diets["shared"] <= diets["avg"]


def test_a_rows_step_size_is_chosen_on_held_out_data(tmp_path: Path) -> None:
    """Fewest rounds to the target on average, then the highest end; without trials, that of the kind."""
    method = METHODS[0]

    def trial(lr: float, seed: int, accuracy: list[float]) -> dict:
        about = {"problem": "digits", "method": method.name, "seed": seed, "rounds": 4, "calibrated_every": None}
        return {**about, "lr": lr, "accuracy": accuracy}

    assert tune.chosen("digits", method, tmp_path) == PROBLEMS["digits"].steps["avg"]
    for seed in tune.SEEDS:
        measure.add(trial(0.1, seed, [0.1, 0.2, 0.9, 0.9]), tmp_path / tune.TRIALS)
        measure.add(trial(0.2, seed, [0.1, 0.9, 0.1, 0.1]), tmp_path / tune.TRIALS)
        measure.add(trial(0.35, seed, [0.1, 0.9, 0.9, 0.9]), tmp_path / tune.TRIALS)
    measure.add(trial(0.5, 0, [0.9, 0.9, 0.9, 0.9]), tmp_path / tune.TRIALS)  # one seed alone does not count
    assert tune.chosen("digits", method, tmp_path) == 0.35


def _flat(runs: list[dict]) -> str:
    return " ".join(page.answer(runs).split())
