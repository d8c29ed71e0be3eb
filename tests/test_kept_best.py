"""The best round is kept, a checkpoint is a plain torch file, and the results show metrics, targets and divergence."""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedge
from fedge.cli.app import app
from fedge.report import read, write_report
from fedge.report.curves import headline
from fedge.runs import checkpoint
from fedge.runs.folder import RunFolderError
from fedge.sweep import run_sweep

DATA = fedge.data.load("digits")
FEDERATION = fedge.Federation(DATA, fedge.partition.iid(DATA.train_y, clients=10))
ALGORITHM = fedge.FedAvg(fedge.models.mlp(seed=0), lr=0.2, epochs=1)
FILE = """
name = "steps"
target = 0.3
[data]
name = "digits"
[partition]
kind = "iid"
clients = 10
[model]
name = "logistic"
[train]
rounds = 4
cohort = 3
seeds = [0, 1]
[[algorithm]]
name = "fedavg"
lr = {sweep = [0.05, 0.1]}
"""


def up_and_down(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Best in the second round: the weights are a clock here."""
    up_and_down.calls += 1  # type: ignore[attr-defined]
    return {1: 0.2, 2: 0.9, 3: 0.9, 4: 0.1}.get(up_and_down.calls, 0.0)  # type: ignore[attr-defined]


def train(rounds: int, **more: Any) -> fedge.Run[Any]:
    return fedge.train(ALGORITHM, FEDERATION, rounds=rounds, cohort=3, **more)


def observe() -> fedge.Observe:
    up_and_down.calls = 0  # type: ignore[attr-defined]
    return fedge.Observe(keep=fedge.Best("test_wave"), metrics={"wave": up_and_down}, checkpoint_every=1)


def same(one: fedge.Run[Any], other: fedge.Run[Any]) -> bool:
    return all(torch.equal(leaf, other.params[name]) for name, leaf in one.params.items())


def test_the_best_round_is_kept_the_first_of_equals(tmp_path: Path) -> None:
    run = train(5, observe=observe(), out=tmp_path / "run")
    assert run.kept is not None
    assert run.kept.round == 2
    assert same(run.best, train(2))
    assert not same(run.best, run)
    assert run.best.rounds == 2
    assert run.summary()["best_round"] == 2
    loaded = fedge.load_run(tmp_path / "run", ALGORITHM, best=True)
    assert same(loaded, run.best)
    assert loaded.rounds == 2
    assert same(fedge.load_run(tmp_path / "run", ALGORITHM), run)


def test_a_resumed_run_keeps_the_same_best(tmp_path: Path) -> None:
    train(3, observe=observe(), out=tmp_path / "run")
    new = observe()
    up_and_down.calls = 3  # type: ignore[attr-defined]
    run = train(5, observe=new, out=tmp_path / "run", resume=True)
    assert run.kept is not None
    assert run.kept.round == 2
    assert same(run.best, train(2))


def test_without_a_name_it_is_accuracy_and_of_a_loss_the_smallest() -> None:
    run = train(4, observe=fedge.Observe(keep="best"))
    assert run.kept is not None
    assert run.kept.value == max(record["test_accuracy"] for record in run.history)
    run = train(4, observe=fedge.Observe(keep=fedge.Best("test_loss")))
    assert run.kept is not None
    assert run.kept.value == -min(record["test_loss"] for record in run.history)


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no best round was kept: train with Observe\(keep=\"best\"\)"):
        _ = train(1, out=tmp_path / "run").best
    with pytest.raises(RunFolderError, match=r"has no best round: it was not trained with keep = \"best\""):
        fedge.load_run(tmp_path / "run", ALGORITHM, best=True)
    with pytest.raises(ValueError, match=r"metric is 'test_wavy', the record has test_loss, test_wave"):
        train(1, observe=fedge.Observe(keep=fedge.Best("test_wavy"), metrics={"wave": lambda s, y: 0.0}))
    with pytest.raises(ValueError, match=r"keep is 'bset' .did you mean 'best'"):
        fedge.Observe(keep="bset")  # type: ignore[arg-type]


def test_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "steps.toml").write_text(FILE)
    settings = ['train.keep={name="best", metric="test_loss"}', "algorithm.lr=0.1", "train.seeds=[0]"]
    (row,) = run_sweep(tmp_path / "steps.toml", tmp_path / "out", settings=settings)
    losses = [one["test_loss"] for one in fedge.results(row["folder"], per="round")]
    found = fedge.load_run(row["folder"], best=True)
    assert found.rounds == losses.index(min(losses)) + 1


# Checkpoints


def test_a_checkpoint_is_a_plain_torch_file(tmp_path: Path) -> None:
    run = train(1, out=tmp_path / "run")
    content = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert content["round"] == 1
    assert all(torch.equal(leaf, run.params[name]) for name, leaf in content["state"]["params"].items())
    assert zipfile.ZipFile(tmp_path / "run" / "checkpoint.pt").testzip() is None


def test_damage_anywhere_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"x": torch.arange(100.0)})
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(checkpoint.CheckpointError, match=r"damaged|not a checkpoint"):
            checkpoint.load(path)
    for length in range(4, len(whole), 50):
        path.write_bytes(whole[:length])
        with pytest.raises(checkpoint.CheckpointError, match="damaged"):
            checkpoint.load(path)


def test_checkpoints_of_earlier_versions_are_read(tmp_path: Path) -> None:
    import io
    import zlib

    buffer = io.BytesIO()
    torch.save({"round": 3}, buffer)
    body = buffer.getvalue()
    (tmp_path / "old.pt").write_bytes(b"fedge checkpoint 1\n" + zlib.crc32(body).to_bytes(4, "big") + body)
    assert checkpoint.load(tmp_path / "old.pt") == {"round": 3}


# Results and the report


def test_results_take_the_target_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "steps.toml").write_text(FILE)
    run_sweep(tmp_path / "steps.toml", tmp_path / "out")
    stated, given = fedge.results(tmp_path / "out"), fedge.results(tmp_path / "out", target=0.3)
    assert stated == given
    assert all(row["rounds_to_target"] for row in stated)
    page = write_report([Path(row["folder"]) for row in stated], tmp_path / "page", 0.3).read_text()
    assert "It is the default" not in page
    page = write_report([Path(row["folder"]) for row in stated], tmp_path / "page").read_text()
    assert "It is the default: 90 %" in page


def test_metrics_of_the_users_own_are_in_report_and_results(tmp_path: Path) -> None:
    def top2(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (scores.topk(2, dim=1).indices == labels[:, None]).any(1).float().mean()

    run = train(3, out=tmp_path / "run", observe=fedge.Observe(metrics={"top2": top2}))
    (row,) = fedge.results(tmp_path / "run")
    assert row["final_top2"] == run.history[-1]["test_top2"]
    rounds = fedge.results(tmp_path / "run", per="round")
    assert [one["test_top2"] for one in rounds] == [one["test_top2"] for one in run.history]
    page = write_report([tmp_path / "run"], tmp_path / "page").read_text()
    assert "final test top2" in page
    assert "top2 against rounds" in page
    assert (tmp_path / "page" / "figures" / "metric_top2.png").is_file()


def test_the_picture_of_a_regression_has_its_loss(tmp_path: Path) -> None:
    x = torch.linspace(0, 1, 60)[:, None]
    data = fedge.data.from_arrays(x[:50], 2 * x[:50, 0], x[50:], 2 * x[50:, 0])
    federation = fedge.Federation(data, fedge.partition.iid(data.train_y, clients=5))
    line = fedge.FedAvg(fedge.models.logistic(1, 1), lr=0.1)
    fedge.train(line, federation, rounds=3, out=tmp_path / "run")
    drawn = headline([read(tmp_path / "run")])
    left, right = drawn.axes
    assert left.get_ylabel() == "test loss"
    assert [len(axes.get_lines()[0].get_xdata()) for axes in (left, right)] == [3, 3]  # type: ignore[arg-type]


def test_a_sweep_says_that_a_run_diverged(tmp_path: Path) -> None:
    (tmp_path / "steps.toml").write_text(FILE)
    settings = ["algorithm.lr={sweep = [0.1, 1e6]}", "train.seeds=[0]"]
    rows = run_sweep(tmp_path / "steps.toml", tmp_path / "out", settings=settings)
    states = {row["algorithm.lr"]: (row["state"], row["failed"]) for row in rows}
    assert states[0.1] == ("done", None)
    assert states[1e6][0] == "failed"
    assert "it diverged" in states[1e6][1]
    shown = CliRunner().invoke(app, ["sweep", "show", str(tmp_path / "out")])
    assert "2 runs: 1 done, 1 failed" in shown.output


def test_an_lstm_is_exported_without_a_warning(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.out(self.lstm(x[:, 0])[0][:, -1])
            return scores

    algorithm = fedge.FedAvg(Net(), lr=0.1, epochs=1)
    run = fedge.train(algorithm, FEDERATION, rounds=1, cohort=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.save(tmp_path / "net.pt2")
    assert (tmp_path / "net.pt2").is_file()
    assert repr(run).startswith("Run(FedAvg, 1 round,")


def test_results_have_the_best_round_and_what_was_measured_then(tmp_path: Path) -> None:
    run = train(4, observe=observe(), out=tmp_path / "run")
    (row,) = fedge.results(tmp_path / "run")
    then = run.history[1]
    assert (row["best_round"], row["best_wave"], row["best_loss"]) == (2, 0.9, then["test_loss"])
    assert row["final_wave"] == 0.1


def test_a_loaded_run_knows_why_it_ended(tmp_path: Path) -> None:
    ends = fedge.Observe(until=lambda history: "enough" if len(history) == 2 else "")
    run = train(4, observe=ends, out=tmp_path / "run")
    assert run.ended == "enough" == fedge.load_run(tmp_path / "run", ALGORITHM).ended
    train(2, out=tmp_path / "all")
    assert fedge.load_run(tmp_path / "all", ALGORITHM).ended == ""


CURVE = (0.2, 0.5, 0.4, 0.3, 0.9, 0.1)


def following(history: Any = CURVE) -> fedge.Observe:
    """The metric goes up and down, and the loss goes its own way."""
    calls = itertools.count()
    metrics = {"wave": lambda scores, labels: history[next(calls)]}
    return fedge.Observe(keep=fedge.Best("test_wave"), metrics=metrics, checkpoint_every=3)


def test_a_best_round_that_no_checkpoint_has_does_not_replace_the_one_that_it_has(tmp_path: Path) -> None:
    def dies(record: Any) -> None:
        if record["round"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(6, out=tmp_path / "a", observe=following(), on_round=dies)  # its checkpoint is of round 3
    assert fedge.load_run(tmp_path / "a", ALGORITHM, best=True).rounds == 2
    run = train(4, out=tmp_path / "a", observe=following(CURVE[3:]), resume=True)
    assert (run.kept.round, run.kept.value) == (2, 0.5)
    assert fedge.load_run(tmp_path / "a", ALGORITHM, best=True).rounds == 2
    assert train(6, out=tmp_path / "a", observe=following(CURVE[4:]), resume=True).kept.round == 5


@pytest.mark.parametrize("moment", ["checkpoint.pt", "best.pt"])
def test_a_kill_while_a_checkpoint_is_written_leaves_the_best_round_of_it(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(3, out=tmp_path / "a", observe=following())
    replace = os.replace

    def dies(old: Any, new: Any, **more: Any) -> None:
        if Path(new).name == moment:
            raise KeyboardInterrupt
        replace(old, new, **more)

    monkeypatch.setattr("os.replace", dies)
    with pytest.raises(KeyboardInterrupt):
        train(6, out=tmp_path / "a", observe=following(CURVE[3:]), resume=True)
    monkeypatch.undo()
    at = 3 if moment == "checkpoint.pt" else 6
    run = train(6, out=tmp_path / "a", observe=following(CURVE[at:]), resume=True)
    assert (run.kept.round, run.kept.value) == (5, 0.9)
    assert fedge.load_run(tmp_path / "a", ALGORITHM, best=True).rounds == 5
    assert not (tmp_path / "a" / "next_best.pt").exists()


def test_another_metric_is_read_from_the_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(3, out=tmp_path / "a", observe=following())
    assert checkpoint.load(tmp_path / "a" / "best.pt")["metric"] == "test_wave"
    run = train(3, out=tmp_path / "a", observe=fedge.Observe(keep=fedge.Best("test_loss")), resume=True)
    losses = [record["test_loss"] for record in run.history]
    assert losses.index(min(losses)) == 2
    assert (run.kept.round, run.kept.value) == (2, -losses[1])
    assert "round 3 is the best so far by what counts now, but its model was not kept: best.pt is that of round 2" in (
        caplog.text
    )
    assert train(6, out=tmp_path / "a", observe=fedge.Observe(keep="best"), resume=True).kept.round > 3


def test_the_best_round_of_another_run_is_refused(tmp_path: Path) -> None:
    for seed in (0, 1):
        train(2, out=tmp_path / str(seed), seed=seed, observe=fedge.Observe(keep="best", checkpoint_every=1))
    shutil.copy(tmp_path / "1" / "best.pt", tmp_path / "0" / "best.pt")
    with pytest.raises(
        RunFolderError, match=r"best.pt is of another run, with train.seed = 1, here it is 0: remove it"
    ):
        train(3, out=tmp_path / "0", observe=fedge.Observe(keep="best"), resume=True)
    (tmp_path / "0" / "best.pt").write_bytes(b"PK")
    with pytest.raises(RunFolderError, match=r"best.pt is damaged \(.*\): remove it"):
        train(3, out=tmp_path / "0", observe=fedge.Observe(keep="best"), resume=True)
