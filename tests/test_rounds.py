"""The yardstick of rounds, end to end on a tiny problem: tuned, run, killed, resumed, shown."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import fedge
from benchmarks.rounds import choice, gradients, grid, measure, store, tables
from benchmarks.rounds.__main__ import main
from fedge.algorithms import ALGORITHMS
from tests.cases import toy_data, toy_model

ROOT = Path(__file__).parent.parent
TIMES = ("wall", "spent", "to", "wall_rounds", "jobs")  # what differs between two runs of the same thing
TINY = """
order = {all = ["digits/FedOVA", "digits/Spectral carried"]}

[tuning]
validation = 0.1
rounds = [1, 2]
keep = 1
seeds = [0]
last = 1

[final]
seeds = [0, 1]
last = 2
window = 2

[common]
epochs = 1
batch_size = 15

[cost]
run = 0.0
method = 0.0
spectral = 1.0
fedova = 1.0

[problem.digits]
data = "digits"
model = "mlp"
clients = 20
labels = 2
cohort = 4
rounds = 2
held_out = 0.3
test = [0.1, 0.99]
train = [0.1]
round = 0.0

[method.FedOVA]
algorithm = "fedavg"
around = "fedova"
settings = [{ lr = 0.1 }, { lr = 0.15 }, { lr = 0.2, lr_decay = 0.9, inner_decay = 0.5 }]

[method."Spectral carried"]
algorithm = "fedavg"
fixed = { optimiser = "spectral", carry_momentum = true }
settings = [{ lr = 0.01 }, { lr = 1e38 }, { lr = 0.005 }]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    (tmp_path / "grid.toml").write_text(TINY)
    (tmp_path / "published").mkdir()
    return ["--grid", str(tmp_path / "grid.toml"), "--results", str(tmp_path / "published")]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for path in sorted(folder.glob("*.jsonl")) for text in path.read_text().splitlines()]


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in TIMES}


def test_a_row_is_tuned_run_and_shown(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    main(["digits", *tiny, "--plan"])
    assert "digits/FedOVA" in capsys.readouterr().out
    main(["all", *tiny, "--try", "--out", str(out)])
    assert "try digits/Spectral carried {'lr': 0.01}" in capsys.readouterr().out
    main(["all", *tiny, "--seconds", "-1", "--out", str(out)])
    assert "the time is over" in capsys.readouterr().out
    assert not out.exists()
    main(["all", *tiny, "--out", str(out)])
    assert "all done" in capsys.readouterr().out
    found = lines(out)
    assert [line["kind"] for line in found] == (["trial"] * 4 + ["run"] * 2) * 2
    first = found[4]
    assert len(first["accuracy"]) == len(first["train_accuracy"]) == 2
    assert first["to"]["test 0.1"]["rounds"] == 1
    assert first["to"]["test 0.99"] is None
    assert 0 < first["final_late"] <= 1
    assert first["to"]["test 0.1"]["up"] > 0
    assert first["to"]["test 0.1"]["gradients"] % 1 == 0
    wild = [line for line in found if line["setting"] == {"lr": 1e38}]
    assert all(line["diverged"] for line in wild)
    assert all(line["kind"] == "trial" for line in wild), "what diverged is not chosen"
    main(["all", *tiny, "--out", str(out)])
    assert lines(out) == found, "nothing is done twice"
    main([*tiny, "--take", str(out)])
    main([*tiny, "--take", str(out)])
    assert lines(tmp_path / "published") == found
    capsys.readouterr()
    main([*tiny, "--tables"])
    shown = capsys.readouterr().out
    assert "rounds to test 10 %" in shown
    assert "Spectral carried" in shown


def test_killed_and_resumed_it_is_the_same(tiny: list[str], tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    main(["digits/FedOVA", *tiny, "--out", str(whole)])
    command = [sys.executable, "-m", "benchmarks.rounds", "digits/FedOVA", *tiny, "--out", str(cut)]
    work = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 300
    while not list(cut.glob("*.jsonl")) and work.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    work.kill()
    work.wait()
    with (cut / "digits.jsonl").open("a") as file:
        file.write('{"kind": "trial", "prob')  # as a kill in the middle of a line would leave it
    main(["digits/FedOVA", *tiny, "--out", str(cut)])
    again = store.read(cut)
    assert {name: timeless(line) for name, line in again.items()} == {
        name: timeless(line) for name, line in store.read(whole).items()
    }


LIKE = """
[problem.more]
data = "digits"
model = "mlp"
clients = 20
labels = 3
cohort = 4
rounds = 2
test = [0.1]
like = "digits"

[method.Wrong]
algorithm = "fedavg"
settings = [{ lr = -1.0 }, { lr = -2.0 }, { lr = -3.0 }]
"""


def test_rows_beside_each_other_are_the_same_and_one_that_fails_is_named(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, rows = tmp_path / "grid.toml", '"digits/FedOVA", "digits/Spectral carried"'
    path.write_text(TINY.replace(rows, f'"digits/Wrong", {rows}, "more/FedOVA"') + LIKE)
    one, two = tmp_path / "one", tmp_path / "two"
    main(["digits/FedOVA", "digits/Spectral carried", "more", *tiny, "--out", str(one)])
    capsys.readouterr()
    main(["all", *tiny, "--jobs", "2", "--out", str(two)])
    said = capsys.readouterr().out
    assert "failed, the rest went on: digits/Wrong" in said
    assert "lr is -1.0" in said
    alone, beside = store.read(one), store.read(two)
    assert {name: timeless(line) for name, line in beside.items()} == {
        name: timeless(line) for name, line in alone.items()
    }
    assert {line["jobs"] for line in beside.values()} == {2}
    assert not any("jobs" in line for line in alone.values())
    assert sum(line["problem"] == "more" for line in beside.values()) == 2
    main(["all", *tiny, "--jobs", "2", "--seconds", "-1", "--out", str(tmp_path / "none")])
    assert "the time is over" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_seconds_per_round_are_measured_alone(tiny: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    main(["digits/FedOVA", *tiny, "--out", str(out)])
    main(["digits/FedOVA", *tiny, "--time", "--out", str(out)])
    main(["digits/FedOVA", *tiny, "--time", "--out", str(out)])
    (line,) = [line for line in lines(out) if line["kind"] == "time"]
    assert line["seconds"] > 0
    main(["digits/Spectral carried", *tiny, "--time", "--out", str(out)])
    untuned = [line for line in lines(out) if line["kind"] == "time"][1]
    assert untuned["setting"] == {"lr": 0.01}, "a row that is not tuned is timed with its first setting"


def test_a_problem_like_another_takes_its_best_end() -> None:
    known = grid.read()
    method = known.methods["FedOVA"]

    def trial(place: int, accuracy: list[float]) -> dict[str, Any]:
        names = {"kind": "trial", "problem": "fmnist-l2", "method": "FedOVA", "setting": method.settings[place]}
        return {**names, "rounds": 40, "seed": 0, "accuracy": accuracy, "diverged": False}

    lines = [trial(0, [0.86, 0.86, 0.86]), trial(1, [0.1, 0.86, 0.9, 0.9, 0.9])]
    found = store.Store(Path("nowhere"), Path("nowhere"))
    found.lines = {store.key(line): line for line in lines}
    assert choice.chosen(known, known.problems["fmnist-l2"], found, "FedOVA") == method.settings[0]
    assert choice.chosen(known, known.problems["fmnist-l3"], found, "FedOVA") == method.settings[1]
    assert choice.chosen(known, known.problems["fmnist-l3"], found, "FedAvg") is None


def test_the_published_grid_is_fair_and_complete() -> None:
    known = grid.read()
    rows = known.rows("all")
    assert {row.method.name for row in rows} == set(known.methods)
    assert len(rows) == len(set(known.order))
    for method in known.methods.values():
        kind = ALGORITHMS[method.algorithm]
        has = {field.name for field in fields(kind)}
        local = known.common if "epochs" in has else {}
        for setting in method.settings:
            kind(None, **local, **method.fixed, **setting)  # type: ignore[call-arg]
        free = {"lr_decay", "inner_decay"} & has  # of a method without local steps neither
        assert any(free <= setting.keys() for setting in method.settings), method.name
    with pytest.raises(SystemExit, match="unknown row"):
        known.rows("nothing")


def test_passes_over_a_clients_examples_by_hand() -> None:
    """A gradient is one pass, a product with a curvature matrix two, a loss or a forward-mode pass one."""
    cases = {
        5: fedge.FedAvg(toy_model(), server_optimiser="soap"),
        6: fedge.FedDANE(toy_model()),
        3 + 1: fedge.FOOF(toy_model(), epochs=3),
        3: fedge.FedOVA(fedge.FedCM(toy_model(outputs=2), epochs=3), classes=3),
        1 + 2 * 20 + 5: fedge.GIANT(toy_model()),
        1 + 2 * 7: fedge.DONE(toy_model(), iterations=7, candidates=()),
        5 + (1 + 2) + (1 + 4): fedge.SubspaceNewton(toy_model(), memory=2),
        5 + 2: fedge.FisherLBFGS(toy_model(), curvature="product"),
        1 + 1 + 3: fedge.FisherLBFGS(toy_model(), source="gradient", dampings=(0.1, 0.3, 1.0)),
    }
    for wanted, algorithm in cases.items():
        assert gradients.passes(algorithm) == wanted, algorithm
    with pytest.raises(ValueError, match="batch_size is 6"):
        gradients.passes(fedge.DONE(toy_model(), batch_size=6))


def test_every_row_of_the_grid_can_be_built() -> None:
    """Every setting of every method, also of those without local training."""
    whole = grid.read()
    data = toy_data()
    for name, method in whole.methods.items():
        problem = grid.Problem("toy", "toy", "mlp", clients=7, cohort=2, rounds=1, test=[])
        for one in method.settings:
            built = measure.algorithm_of(grid.Row(problem, method), one, whole, data, 0)
            assert gradients.passes(built.inner) > 0, name
            assert tables.setting(one, method), name


def test_settings_are_written_with_words_and_lists() -> None:
    method = grid.Method("m", "fedavg", [{"lr": 0.1, "server_betas": [0.9, 0.5]}, {"lr": 0.2, "on": True, "as": "x"}])
    assert tables.setting(method.settings[0], method) == "lr 0.1\\*, server_betas 0.9/0.5"
    assert tables.setting(method.settings[1], method) == "lr 0.2\\*, on True, as x"


def started(monkeypatch: pytest.MonkeyPatch, name: str, *options: str) -> list[float]:
    """The share that is held out of the data of every run that a row starts."""
    shares, real = [], measure.data_of

    def spy(name: str, validation: float) -> fedge.data.Data:
        shares.append(validation)
        return real(name, validation)

    monkeypatch.setattr(measure, "data_of", spy)
    main([name, *options])
    return shares


def test_tuning_sees_held_out_data_and_final_runs_all_of_the_training_set(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "grid.toml", tmp_path / "out"
    path.write_text(TINY.replace("keep = 1", "keep = 2"))
    assert started(monkeypatch, "digits/FedOVA", *tiny, "--out", str(out)) == [0.1] * 3 + [0.0] * 2
    found = lines(out)
    assert [(line["kind"], line["rounds"]) for line in found] == [("trial", 1)] * 3 + [("trial", 2)] * 2 + [
        ("run", 2)
    ] * 2
    kept = [line["setting"] for line in found if (line["kind"], line["rounds"]) == ("trial", 2)]
    ahead = sorted(found[:3], key=lambda line: (line["accuracy"][-1] < 0.3, -line["accuracy"][-1]))
    assert kept == [line["setting"] for line in ahead[:2]]


def test_a_second_stage_that_is_resumed_is_held_out_too(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    main(["digits/FedOVA", *tiny, "--out", str(out)])
    path = out / "digits.jsonl"
    path.write_text("".join(text + "\n" for text in path.read_text().splitlines()[:3]))
    assert started(monkeypatch, "digits/FedOVA", *tiny, "--out", str(out)) == [0.1, 0.0, 0.0]


def test_gradients_of_a_round_by_hand() -> None:
    """Three epochs over 5 and 4 examples, of two labels and of one; FedOVA trains a model per label."""
    data = toy_data()
    kept = [torch.where(data.train_y == label)[0].tolist() for label in range(3)]
    federation = fedge.Federation(data, [kept[0][:3] + kept[1][:2], kept[2][:4]])
    assert measure.evaluations(fedge.FedAvg(toy_model(), epochs=3), federation).tolist() == [15, 12]
    ova = fedge.FedOVA(fedge.FedAvg(toy_model(outputs=2), epochs=3), classes=3)
    assert measure.evaluations(ova, federation).tolist() == [30, 12]


def test_the_mean_of_late_rounds_and_what_was_spent_by_hand(tiny: list[str], tmp_path: Path) -> None:
    """With a window of two rounds: after three, half of the third and half of the mean of the others."""
    known = grid.read(tmp_path / "grid.toml")
    (row,) = known.rows("digits/FedOVA")
    params = []
    for rounds in (1, 2, 3):
        going = measure.start(row, {"lr": 0.1}, known, 0)
        measure.advance(going, row, rounds, 0, "cpu", lambda: False)
        assert going.run is not None
        params.append(going.algorithm.params(going.run.state))
    wanted = {name: (one + params[1][name]) / 4 + params[2][name] / 2 for name, one in params[0].items()}
    assert going.run is not None
    torch.testing.assert_close(going.run.state["mean"], wanted)
    inner, data = going.algorithm.inner, going.federation.data
    by_hand = fedge.Run(inner, inner.with_params(going.run.state["inner"], wanted), going.run.handle)
    right = (by_hand.predict(data.test_x) == data.test_y).double().mean()
    assert measure.late_accuracy(going) == pytest.approx(float(right), abs=0.003)
    sizes, labels = going.federation.sizes.tolist(), (going.federation.label_counts() > 0).sum(1).tolist()
    assert set(labels) == {2}
    told = measure.described(going, row, known)["spent"]["gradients"]
    assert told == sum(2 * sizes[k] for record in going.records for k in record["cohort"])


def test_new_lines_say_how_spectral_steps_multiply_and_what_the_algorithm_notes() -> None:
    known = grid.read()
    say = {name: measure.products(method).get("products") for name, method in known.methods.items()}
    assert say["FedAvg-SGD"] is None
    assert say["Spectral carried"] == {"optimiser": fedge.Spectral().products}
    assert say["Spectral carried, fast"] == {"optimiser": fedge.Spectral.fast().products}
    assert say["Spectral + server spectral"] == {"optimiser": "same", "server_optimiser": "same"}
    algorithm, problem = fedge.FisherLBFGS(toy_model()), grid.Problem("toy", "toy", "mlp", 3, 2, 2, test=[])
    federation = fedge.Federation(toy_data(), [range(30), range(30, 60), range(60, 90)])
    going, row = (
        measure.Going(measure.Beside(algorithm, 2), federation, None, []),
        grid.Row(problem, known.methods["Spectral carried"]),
    )
    measure.advance(going, row, 2, 0, "cpu", lambda: False)
    told = measure.described(going, row, known)
    assert told["products"] == say["Spectral carried"]
    notes = told["notes"]
    assert notes["accepted_pairs"] + notes["refused_pairs"] == 2
    assert json.loads(json.dumps(notes)) == notes
    assert {"cos_sy", "length_sy"} <= notes.keys()
