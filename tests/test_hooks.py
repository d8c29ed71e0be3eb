"""What a user adds to a run: functions that are told of rounds, further metrics, and an end before the last round."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner

import fedge
from fedge.cli.app import app
from fedge.experiment import ExperimentError, build, compare, parse
from fedge.experiment.sweeps import read_sweep
from fedge.report.errors import ReportError
from fedge.report.trackers import TRACKERS, Tracker, open_tracker, scalars
from fedge.runs.experiments import is_finished
from fedge.sweep import Entry

from .test_grid import tables

DATA = fedge.data.load("digits")
FEDERATION = fedge.Federation(DATA, fedge.partition.iid(DATA.train_y, clients=10))


def train(rounds: int = 6, **options: object) -> fedge.Run:
    algorithm = fedge.FedAvg(fedge.models.logistic(seed=0), lr=0.1, epochs=1)
    return fedge.train(algorithm, FEDERATION, rounds=rounds, cohort=3, **options)  # type: ignore[arg-type]


def top2(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores.topk(2, dim=1).indices == labels[:, None]).any(1).double().mean()


# Functions of rounds, and metrics


def test_several_functions_are_told_of_every_round() -> None:
    one, two = list[int](), list[dict]()
    run = train(3, on_round=[lambda record: one.append(record["round"]), two.append])
    assert one == [1, 2, 3]
    assert two == run.history


def test_a_function_of_rounds_cannot_falsify_the_history() -> None:
    def lie(record: dict) -> None:
        record["test_accuracy"] = 1.0
        record["cohort"].clear()

    seen = list[dict]()
    run = train(2, on_round=[lie, seen.append])
    honest = train(2)
    assert [one["test_accuracy"] for one in run.history] == [one["test_accuracy"] for one in honest.history]
    assert [one["cohort"] for one in seen] == [one["cohort"] for one in honest.history]


@pytest.mark.parametrize("value", [90, 0, -0.5, float("nan")])
def test_an_accuracy_to_reach_is_a_share(value: float) -> None:
    with pytest.raises(ValueError, match=r"value is .*, it must be"):
        fedge.Reached(value)
    with pytest.raises(ValueError, match=r"value is 85, it must be above 0 and at most 1: write 0\.85 for"):
        fedge.Reached(85, metric="train_accuracy")
    assert fedge.Reached(90, metric="test_mae", best="smallest").value == 90


def test_a_metric_is_computed_beside_the_others_from_the_same_scores() -> None:
    run = train(2, observe=fedge.Observe(metrics={"top2": top2}, evaluate_train=True))
    expected = float(top2(run.scores(DATA.test_x), DATA.test_y))
    assert run.history[-1]["test_top2"] == pytest.approx(expected, abs=1e-12)
    assert run.history[-1]["train_top2"] > run.history[-1]["train_accuracy"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"metrics": {"f1": 3}}, "metric 'f1' is 3, it must be a function of scores and labels"),
        ({"metrics": {"loss": top2}}, "metric 'loss' is computed anyhow: choose another name than loss, accuracy"),
        ({"until": 3}, "until is 3, it must be a function of the records"),
    ],
)
def test_what_is_no_function_is_refused(settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fedge.Observe(**settings)


def test_a_metric_that_gives_no_number_is_named() -> None:
    with pytest.raises(ValueError, match=r"metric 'odd' gave a tensor of shape \[2\], it must give one number"):
        train(1, observe=fedge.Observe(metrics={"odd": lambda scores, labels: scores[:2, 0]}))


# The end


def records(*values: float | None) -> list[dict]:
    return [
        {"round": at, "up_bytes": 1_000_000, "down_bytes": 2_000_000, "test_accuracy": value}
        for at, value in enumerate(values, 1)
    ]


def first_end(until: fedge.Plateau | fedge.Reached | fedge.Spent, history: list[dict]) -> int | None:
    return next((n for n in range(1, len(history) + 1) if until(history[:n])), None)


@pytest.mark.parametrize(
    ("values", "patience", "least", "end"),
    [
        ((0.1, 0.2, 0.2, 0.2, 0.3), 2, 0.0, 4),
        ((0.1, 0.2, 0.2, 0.3, 0.3), 2, 0.0, None),
        ((0.1, None, 0.2, None, 0.2, None, 0.2), 2, 0.0, 7),
        ((0.1, 0.12, 0.14, 0.16), 2, 0.05, 3),
        ((0.5, 0.4, 0.3), 1, 0.0, 2),
    ],
)
def test_a_plateau_is_found(values: tuple, patience: int, least: float, end: int | None) -> None:
    assert first_end(fedge.Plateau(patience, least=least), records(*values)) == end


def test_a_plateau_agrees_with_a_plain_count() -> None:
    """Every sequence of six values: enough once the best of all but the last two has not been beaten by them."""
    for values in itertools.product((0.1, 0.2, 0.3), repeat=6):
        plain = next(
            (n for n in range(3, 7) if max(values[: n - 2]) >= max(values[n - 2 : n])), None
        )  # the first n after which two rounds in a row brought nothing new
        assert first_end(fedge.Plateau(2), records(*values)) == plain, values


def test_a_smaller_loss_is_an_improvement() -> None:
    history = [{"round": at, "test_loss": value} for at, value in enumerate((3.0, 2.0, 1.0, 1.5), 1)]
    assert first_end(fedge.Plateau(1, metric="test_loss", best="smallest"), history) == 4
    assert first_end(fedge.Reached(1.2, metric="test_loss", best="smallest"), history) == 3


def test_megabytes_of_both_ways_are_counted() -> None:
    assert first_end(fedge.Spent(5), records(0.1, 0.2, 0.3)) == 2


def test_a_run_ends_when_it_is_enough_and_says_why(tmp_path: Path) -> None:
    whole = train(6)
    wanted = sorted(record["test_accuracy"] for record in whole.history)[2]
    rounds = next(record["round"] for record in whole.history if record["test_accuracy"] >= wanted)
    run = train(6, observe=fedge.Observe(until=fedge.Reached(wanted)), out=tmp_path / "run")
    assert run.rounds == rounds < 6
    assert not run.stopped
    assert (
        run.ended
        == run.summary()["ended"]
        == f"test_accuracy is {run.history[-1]['test_accuracy']:.4g} after "
        + (f"round {rounds}, {wanted:g} was wanted")
    )
    assert [one["test_loss"] for one in run.history] == [one["test_loss"] for one in whole.history[:rounds]]
    assert is_finished(tmp_path / "run", 6, until=True)
    assert not is_finished(tmp_path / "run", 6)


def test_a_plain_function_of_the_records_will_do() -> None:
    assert train(6, observe=fedge.Observe(until=lambda history: len(history) == 2)).rounds == 2


def test_what_it_does_with_the_records_changes_no_run() -> None:
    def until(history: list[dict]) -> bool:
        history[-1]["round"] = 99
        history.clear()
        return False

    run = train(3, observe=fedge.Observe(until=until))
    assert [one["round"] for one in run.history] == [1, 2, 3]


def test_it_is_asked_after_evaluated_rounds_only() -> None:
    run = train(6, observe=fedge.Observe(evaluate_every=4, until=lambda history: "enough"))
    assert run.rounds == 4
    assert "test_accuracy" in run.history[-1]


def test_a_run_that_ended_goes_on_without_the_end_and_not_with_it(tmp_path: Path) -> None:
    ends = fedge.Observe(until=fedge.Spent(0.0001))
    assert train(4, observe=ends, out=tmp_path / "run").rounds == 1
    assert train(4, observe=ends, out=tmp_path / "run", resume=True).rounds == 1
    run = train(4, observe=fedge.Observe(metrics={"top2": top2}), out=tmp_path / "run", resume=True)
    assert (run.rounds, run.ended) == (4, "")
    assert ["test_top2" in record for record in run.history] == [False, True, True, True]


def test_an_end_in_a_file(tmp_path: Path) -> None:
    settings = ["train.seeds=[0]", "algorithm.1.lr=0.1", 'train.until={name = "spent", megabytes = 0.0001}']
    found = tables(*settings)
    del found["train"]["seeds"]
    experiment = parse(found)
    assert experiment.train["until"] == {"name": "spent", "megabytes": 0.0001}
    assert [outcome.run.rounds for outcome in compare(experiment, tmp_path / "out") if outcome.run] == [1, 1]
    for until, words in (
        ({"name": "plateu"}, "until.name is 'plateu'.*did you mean 'plateau'"),
        ({"name": "plateau", "patience": 0}, "train: patience is 0, it must be a whole number of at least 1"),
    ):
        with pytest.raises(ExperimentError, match=words):
            build(parse(found | {"train": found["train"] | {"until": until}}))


def test_an_end_that_is_not_set_leaves_the_keys_of_runs_alone() -> None:
    (run, *_) = read_sweep(tables()).runs()
    entry = Entry("x", "x", run.label, 0, run.config)
    older = {key: value for key, value in run.config["train"].items() if key != "until"}
    assert run.config["train"]["until"] is None
    assert entry.key == replace(entry, config=run.config | {"train": older}).key
    ending = run.config["train"] | {"until": {"name": "spent", "megabytes": 1.0}}
    assert entry.key != replace(entry, config=run.config | {"train": ending}).key


# Trackers


class Kept(Tracker):
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict]] = []

    def write(self, step: int, values) -> None:  # type: ignore[no-untyped-def]
        self.seen.append((step, dict(values)))

    def close(self) -> None:
        self.seen.append((0, {}))


def test_a_tracker_of_your_own_is_one_method() -> None:
    with Kept() as tracker:
        run = train(2, on_round=tracker.log, observe=fedge.Observe(metrics={"top2": top2}))
    (first, values), (second, _), end = tracker.seen
    assert (first, second, end) == (1, 2, (0, {}))
    assert values["test/accuracy"] == run.history[0]["test_accuracy"]
    assert values["test/top2"] == run.history[0]["test_top2"]
    assert set(values) == {"test/accuracy", "test/loss", "test/top2", "bytes/up", "bytes/down", "seconds", "dropped"}


class Away(Kept):
    """A tool whose server goes away after the first round."""

    def write(self, step: int, values) -> None:  # type: ignore[no-untyped-def]
        if step > 1:
            raise ConnectionError("no route\x1b[2J to host")
        super().write(step, values)


def test_a_tracker_that_fails_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    with Away() as tracker:
        run = train(4, on_round=tracker.log)
    assert run.rounds == 4
    assert [step for step, _ in tracker.seen] == [1], "it is not asked again, nor closed"
    assert [one.getMessage() for one in caplog.records if one.name == "fedge"] == [
        "Away gets no more rounds, the run goes on: ConnectionError: no route [2J to host"
    ]


def test_a_tracker_that_cannot_be_closed_does_not_spoil_the_end(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Kept):
        def close(self) -> None:
            raise OSError("disk full")

    with Stuck() as tracker:
        assert train(2, on_round=tracker.log).rounds == 2
    assert "Stuck gets no more rounds, the run goes on: OSError: disk full" in caplog.text


TWO = """
name = "two"
data = {name = "digits"}
partition = {kind = "iid", clients = 4}
model = {name = "logistic"}
algorithm = [{name = "fedavg"}, {name = "fedprox"}]
train = {rounds = 3, cohort = 2}
"""


def test_a_tool_that_is_away_from_the_start_is_said_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Later than that, whoever began goes on."""
    opened: list[str] = []

    def away(folder: Path, title: str, config: object) -> Tracker:
        if title in refused:
            raise ConnectionError("nobody listens")
        opened.append(title)
        return Away()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TRACKERS, "tensorboard", away)
    (tmp_path / "two.toml").write_text(TWO)
    words = ["run", "two.toml", "--tensorboard", "--no-report", "--out"]
    refused = {"fedavg", "fedprox"}
    found = CliRunner().invoke(app, [*words, "a"])
    said = "Error: cannot log to tensorboard, ConnectionError: nobody listens: see that it can be reached, or leave it"
    assert (found.exit_code, said in found.output) == (2, True), found.output
    assert not list(tmp_path.glob("a/*/rounds.jsonl"))
    refused = {"fedprox"}
    found = CliRunner().invoke(app, [*words, "b"])
    assert found.exit_code == 0, found.output
    assert [len(one.read_text().splitlines()) for one in tmp_path.glob("b/*/rounds.jsonl")] == [3, 3]
    assert opened == ["fedavg"]
    assert "fedprox is not logged, the run goes on: cannot log to tensorboard" in caplog.text


def test_numbers_that_are_not_finite_are_left_out() -> None:
    assert scalars({"round": 1, "test_loss": float("nan"), "test_accuracy": 0.5}) == {
        "test/accuracy": 0.5,
        "dropped": 0,
    }


def test_an_unknown_tool_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tracker is 'wandd' \(did you mean 'wandb'\?\)"):
        open_tracker("wandd", tmp_path, "run")


def test_the_command_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedge.cli.run.find_spec", lambda name: None)
    found = CliRunner().invoke(app, ["run", "--track", "mlflow"])
    assert (found.exit_code, found.output) == (1, "Error: --track mlflow needs mlflow: pip install 'fedge[mlflow]'\n")
    found = CliRunner().invoke(app, ["run", "--track", "excel"])
    assert found.exit_code == 2
    assert "--track is 'excel', it must be one of ['tensorboard', 'mlflow', 'wandb']" in found.output
    assert not list(tmp_path.iterdir())


def test_tensorboard_follows_every_run_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from .test_grid import FILE

    monkeypatch.chdir(tmp_path)
    Path("steps.toml").write_text(FILE)
    words = ["run", "steps.toml", "--track", "tensorboard", "--no-report", "--set", "train.seeds=[0]"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    folders = sorted(Path("runs/steps").glob("*/tensorboard"))
    assert len(folders) == 3
    events = EventAccumulator(str(folders[0]))
    events.Reload()
    assert [one.step for one in events.Scalars("test/accuracy")] == [1, 2, 3]


@pytest.mark.filterwarnings("default")  # theirs, about their own parts
@pytest.mark.parametrize("tool", ["mlflow", "wandb"])
def test_a_tool_gets_the_rounds_offline(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For real; nothing is sent anywhere."""
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    own = tmp_path / "digits" / "fedavg"
    for rounds in (2, 3):  # the second goes on with the first
        with open_tracker(tool, own, "FedAvg", {"algorithm": {"lr": 0.1}}) as tracker:
            run = train(rounds, on_round=tracker.log, out=own, resume=own.is_dir())
    if tool == "wandb":
        assert list(own.glob("wandb/offline-run-*/*.wandb"))
        return
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'digits' / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (found.info.run_name, found.info.status, found.data.params["algorithm.lr"]) == ("FedAvg", "FINISHED", "0.1")
    seen = client.get_metric_history(found.info.run_id, "test/accuracy")
    assert {one.step: one.value for one in seen} == {one["round"]: one["test_accuracy"] for one in run.history}


@pytest.mark.filterwarnings("default")  # theirs, about their own parts
@pytest.mark.parametrize(
    ("tool", "name"),
    [
        ("mlflow", "mlflow.db"),
        ("mlflow", "mlflow.db-journal"),
        ("mlflow", "mlflow.db-wal"),
        ("wandb", "fedavg/wandb"),
        ("wandb", "fedavg/.wandb"),
    ],
)
def test_a_tool_does_not_write_through_a_link(
    tool: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("MLFLOW_TRACKING_URI", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    mine = tmp_path / "mine"
    if tool == "wandb":
        mine.mkdir()
    (tmp_path / "runs/fedavg").mkdir(parents=True)
    (tmp_path / "runs" / name).symlink_to(mine)
    with pytest.raises(ReportError, match=f"it is a link, and nothing is written through one: remove it: .*{name}"):
        open_tracker(tool, tmp_path / "runs/fedavg", "FedAvg")
    assert not mine.exists() or not list(mine.iterdir())


@pytest.mark.parametrize("until", [fedge.Reached(0.9, metric="accuracy"), fedge.Plateau(3, metric="accuracy")])
def test_a_metric_that_no_record_has_is_refused(until: object) -> None:
    with pytest.raises(ValueError, match=r"metric is 'accuracy' \(did you mean 'test_accuracy'\?\), the record has"):
        until([{"round": 1, "test_loss": 1.0, "test_accuracy": 0.5}])  # type: ignore[operator]
    assert until([{"round": 1}]) == ""  # type: ignore[operator]


@pytest.mark.parametrize("ask", [fedge.Reached(0.9, "cohort"), fedge.Plateau(3, "cohort"), fedge.Best("cohort")])
def test_a_field_that_is_no_number_is_no_metric(ask: Any) -> None:
    record = {"round": 1, "cohort": [1, 2], "test_loss": 1.0, "test_accuracy": 0.5}
    with pytest.raises(ValueError, match="metric is 'cohort', which is a list in the record: name a number, such as"):
        ask.value(record) if isinstance(ask, fedge.Best) else ask([record])


@pytest.mark.parametrize(
    ("setting", "told"),
    [("chunk=0", "chunk is 0"), ("workers=-1", "workers is -1"), ('precision="bf16"', "precision is 'bf16'")],
)
def test_an_engine_that_cannot_be_is_said_in_one_line(setting: str, told: str, tmp_path: Path) -> None:
    words = ["--out", str(tmp_path / "a"), "--set", "train.device=cpu", "--set", f"train.{setting}", "--no-report"]
    found = CliRunner().invoke(app, ["run", *words])
    assert (found.exit_code, told in found.stderr, found.stderr.count("\n")) == (2, True, 1), found.stderr


def test_tensorboard_does_not_go_where_a_link_in_the_folder_leads(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "mine").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "mine")
    with pytest.raises(ReportError, match="nothing is written through one"):
        open_tracker("tensorboard", tmp_path / "run", "a")
    assert not list((tmp_path / "mine").iterdir())
