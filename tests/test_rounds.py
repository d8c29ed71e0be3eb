"""The yardstick of rounds, end to end on a tiny problem: tuned, run, killed, resumed, shown."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rounds import grid, store
from benchmarks.rounds.__main__ import main
from fedge.algorithms import ALGORITHMS

ROOT = Path(__file__).parent.parent
TIMES = ("wall", "spent", "to", "wall_rounds")  # what differs between two runs of the same thing
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
    until = time.monotonic() + 60
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


def test_the_published_grid_is_fair_and_complete() -> None:
    known = grid.read()
    rows = known.rows("all")
    assert {row.method.name for row in rows} == set(known.methods)
    assert len(rows) == len(set(known.order))
    for method in known.methods.values():
        kind = ALGORITHMS[method.algorithm]
        for setting in method.settings:
            kind(None, **known.common, **method.fixed, **setting)  # type: ignore[call-arg]
        assert any("lr_decay" in setting and "inner_decay" in setting for setting in method.settings), method.name
    with pytest.raises(SystemExit, match="unknown row"):
        known.rows("nothing")
