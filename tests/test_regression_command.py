"""A regression on the command line: loss and metrics instead of an accuracy; what needs classes is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fedge
from fedge.cli.app import app
from fedge.cli.narrow import left_out
from fedge.problem import check_metrics

MINE = """
import numpy as np
import fedge

def load(count: int = 90):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, 4)).astype("float32")
    y = (x @ np.array([1.0, -2.0, 0.5, 3.0])).astype("float32")
    return fedge.data.from_arrays(x[30:], y[30:], x[:30], y[:30])

def within(outputs, y):
    return float(((outputs.reshape(y.shape) - y).abs() < 1).float().mean())

def vector(outputs, y):
    return outputs.reshape(y.shape) - y

def broken(outputs, y):
    raise KeyError("owner")
"""
FILE = """
name = "houses"
[data]
name = "mine.py:load"
[partition]
kind = "iid"
clients = 3
[model]
name = "mlp"
[train]
rounds = 3
metrics = ["mine.py:within", "rmse"]
[[algorithm]]
name = "fedavg"
loss = "mse"
lr = 0.05
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "houses.toml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def run(*settings: str, code: int = 0, out: str = "out") -> str:
    words = [word for setting in settings for word in ("--set", setting)]
    result = CliRunner().invoke(app, ["run", "houses.toml", "--out", out, "--no-report", *words])
    assert result.exit_code == code, result.output
    return result.output


def test_one_run_shows_loss_and_metrics(here: Path) -> None:
    said = run()
    (row,) = fedge.results("out")
    shown = [f"{row[name]:.4g}" for name in ("final_loss", "final_loss", "final_within", "final_rmse", "final_r2")]
    (line,) = (line.split() for line in said.splitlines() if line.startswith("fedavg  "))
    assert line[1:7] == ["3", *shown]
    assert "–" not in said
    assert "acc %" not in said
    assert f"fedavg: round 3/3, loss {row['final_loss']:.4g}, " in said


def test_a_sweep_names_what_has_no_room_and_keeps_its_labels(here: Path) -> None:
    said = run("algorithm.lr={sweep = [0.01, 0.05]}", "train.seeds=[0, 1]", "train.per_client=true")
    table = [line for line in said.splitlines() if line.startswith("fedavg lr=") and "after" not in line]
    assert [line[:14] for line in table] == ["fedavg lr=0.01", "fedavg lr=0.05"]
    assert all(len(line) <= 80 for line in table)
    assert "within" in said.partition("no room for")[0]
    assert "mae: in the report and in fedge.results('out')" in said
    assert "mse" not in said.replace("rmse", ""), "it is the loss, which is shown"
    first = next(line for line in said.splitlines() if line.startswith("fedavg lr=0.01 seed=0:"))
    assert ": loss " in first
    assert "%" not in said


def test_metrics_that_nobody_asked_for_are_left_out_first_and_own_ones_last() -> None:
    head, rows = (
        ["algorithm", "final\nmine", "final\nr2", "final\nmae", "MB\nup"],
        [["a" * 40, "7", "0.5", "0.25", "1"]],
    )
    metrics = ["mine", "r2", "mae"]
    assert left_out(head, rows, metrics, 22 + 3 * 7 + 4) == []
    assert left_out(head, rows, metrics, 22 + 3 * 7 + 3) == ["final\nmae"]
    assert left_out(head, rows, metrics, 22 + 7) == ["final\nmae", "final\nr2", "MB\nup"]
    assert left_out(head, rows, metrics, 10) == ["final\nmae", "final\nr2", "MB\nup", "final\nmine"]


@pytest.mark.parametrize("more", [[], ["train.seeds=[0, 1]"]])
def test_what_needs_classes_is_refused(here: Path, more: list[str]) -> None:
    for name in ("f1", "auc", "balanced_accuracy", "perplexity"):
        said = run(f'train.metrics=["{name}"]', *more, code=2)
        assert f"metric '{name}' does not fit" in said
        assert "for which there are mae, mse, r2, rmse; or give a function" in said
    said = run("target=0.9", *more, code=2)
    assert "target is 0.9, but a target is a test accuracy, and a regression has none: leave it out" in said
    assert not list(here.glob("out/*/rounds.jsonl"))


@pytest.mark.parametrize("more", [[], ["train.seeds=[0, 1]"]])
def test_a_loss_for_other_targets_is_refused_before_anything_starts(here: Path, more: list[str]) -> None:
    said = run("algorithm.loss=cross_entropy", *more, code=2)
    assert "the labels are torch.float32 and the loss is cross-entropy" in " ".join(said.split())
    digits = ['data={name = "digits"}', 'train.metrics=["f1"]', "algorithm.loss=mse"]
    said = " ".join(run(*digits, *more, code=2).split())
    assert "the targets are class numbers (torch.int64) and the loss is mse, which is for floating-point ones" in said
    assert not (here / "out").exists()


def test_partition_show_of_a_regression(here: Path) -> None:
    (here / "mine.py").write_text(
        MINE
        + """
def owned():
    data = load()
    return fedge.Federation(data, fedge.partition.by_group(["ann"] * 10 + ["bob"] * 50))
"""
    )
    words = ["partition", "show", "houses.toml", "--set", 'data={name = "mine.py:owned"}', "--set", "partition={}"]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.output
    lines = said.output.splitlines()
    assert lines[0] == "2 clients, 60 examples, targets that are numbers (a regression)"
    ann, bob = (line.split() for line in lines if line.strip().startswith(("ann", "bob")))
    assert (ann[1], bob[1]) == ("10", "50")
    assert float(ann[2]) < float(ann[3]) < float(ann[4])
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert found["targets"][0]["mean"] == pytest.approx(float(ann[3]), rel=1e-3)
    refused = CliRunner().invoke(app, [*words, "--out", "p.png"])
    assert refused.exit_code == 2
    assert "a regression has none" in refused.output


def test_the_picture_is_called_after_what_it_shows(here: Path) -> None:
    said = CliRunner().invoke(app, ["run", "houses.toml", "--out", "out"])
    assert said.exit_code == 0, said.output
    assert (here / "out" / "loss.png").is_file()
    assert not (here / "out" / "accuracy.png").exists()


def test_metrics_of_ours_fit_their_problem() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((20, 4)).astype("float32"), np.arange(20) % 2
    classes = fedge.Federation(fedge.data.from_arrays(x, y, x, y), [range(20)])
    model = fedge.models.mlp(inputs=4, outputs=2, seed=0)
    with pytest.raises(
        ValueError, match=r"metric 'off' does not fit: this run learns classes, .* are auc, .* perplexity"
    ):
        fedge.train(fedge.FedAvg(model), classes, rounds=1, observe=fedge.Observe(metrics={"off": "r2"}))
    check_metrics({"r2": lambda outputs, y: 1.0}, classes.data.train_y, fedge.cross_entropy)  # of the user's own
    holds = classes.data.train_y.float()
    check_metrics(["f1", "auc"], holds, lambda outputs, y: outputs)  # 0 and 1 under a loss of the user's own
    with pytest.raises(ValueError, match="metric 'f1' does not fit"):
        check_metrics(["f1"], holds + 0.5, fedge.losses.mse)


def test_a_metric_that_fails_is_named_with_its_line(here: Path) -> None:
    line = 1 + MINE.splitlines().index('    raise KeyError("owner")')
    said = run('train.metrics=["mine.py:broken"]', code=2)
    assert f"metric 'broken' raised KeyError: 'owner' ({here / 'mine.py'}, line {line})" in said
    said = run('train.metrics=["mine.py:vector"]', "train.seeds=[0, 1]", "train.rounds=1", code=1, out="two")
    assert said.count("Error:") == 1, "one reason, said once for both runs"
    assert "fedavg seed=0, fedavg seed=1 failed: fedavg: metric 'vector' gave a tensor of shape [30], it must" in said


def test_a_report_says_that_its_target_counts_nothing(here: Path) -> None:
    run("train.rounds=1")
    result = CliRunner().invoke(app, ["report", "out", "--target", "0.9"])
    assert result.exit_code == 0
    said = "counts nothing: it is a test accuracy, and no run has one"
    assert f"target 0.9 {said}" in result.stderr
    assert "The target 0.9 counts nothing" in (here / "out" / "report.html").read_text()
    assert said not in CliRunner().invoke(app, ["report", "out"]).stderr


def test_the_help_writes_lists_as_a_file_does() -> None:
    said = " ".join(CliRunner().invoke(app, ["run", "--help"]).output.split())
    assert "(seeds = [0, 1, 2], lr = {sweep = [0.05, 0.1]})" in said
