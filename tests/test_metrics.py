"""Metrics by name, in batches and all at once, and client by client; against plain loops."""

from __future__ import annotations

import json
import math
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import fedge
from fedge import evaluate
from fedge.experiment import ExperimentError, build, compare, parse
from fedge.metrics import METRICS, Streamed

from .test_problems import generator, linear, numbers

DATA = fedge.data.load("digits")
LISTS = fedge.partition.dirichlet(DATA.train_y, clients=12, alpha=0.3, seed=0)


def algorithm() -> fedge.FedAvg:
    return fedge.FedAvg(fedge.models.logistic(seed=0), lr=0.05, epochs=1)


def plain_f1(guess: np.ndarray, y: np.ndarray, classes: int) -> float:
    found = []
    for c in range(classes):
        if not (y == c).any():
            continue
        hit = ((guess == c) & (y == c)).sum()
        found.append(2 * hit / ((guess == c).sum() + (y == c).sum()))
    return float(np.mean(found))


def plain_auc(scores: np.ndarray, holds: np.ndarray) -> float:
    """Every pair of one that holds and one that does not."""
    pairs = scores[holds][:, None] - scores[~holds][None]
    return float((pairs > 0).mean() + 0.5 * (pairs == 0).mean())


def test_named_metrics_equal_plain_loops() -> None:
    g = generator()
    out, y = torch.randn(200, 4, generator=g), torch.randint(4, (200,), generator=g)
    out = (out * 4).round() / 4  # with ties
    guess = out.argmax(1)
    assert METRICS["f1"](out, y) == pytest.approx(plain_f1(guess.numpy(), y.numpy(), 4))
    recall = np.mean([float((guess[y == c] == c).double().mean()) for c in range(4)])
    assert METRICS["balanced_accuracy"](out, y) == pytest.approx(recall)
    each = [plain_auc(out[:, c].numpy(), (y == c).numpy()) for c in range(4)]
    assert METRICS["auc"](out, y) == pytest.approx(np.mean(each))
    two = torch.randn(60, 2, generator=g)
    holds = torch.randint(2, (60,), generator=g)
    assert METRICS["auc"](two, holds) == pytest.approx(plain_auc((two[:, 1] - two[:, 0]).numpy(), holds.numpy() == 1))
    hit = int(((two.argmax(1) == 1) & (holds == 1)).sum())
    assert METRICS["f1"](two, holds) == pytest.approx(2 * hit / int((two.argmax(1) == 1).sum() + holds.sum()))
    assert math.isnan(METRICS["auc"](two, torch.zeros(60).long()))


@pytest.mark.parametrize("name", sorted(METRICS))
def test_a_streamed_metric_does_not_depend_on_the_batches(name: str) -> None:
    metric, g = METRICS[name], generator(3)
    if not isinstance(metric, Streamed):
        assert name == "auc"
        return
    floats = name in ("mse", "mae", "rmse", "r2")
    out = torch.randn(97, 3, generator=g)
    y = torch.randn(97, 3, generator=g) if floats else torch.randint(3, (97,), generator=g)
    sums = [metric.sums(one, other) for one, other in zip(out.split(10), y.split(10), strict=True)]
    assert metric.value(reduce(metric.joined, sums)) == pytest.approx(metric(out, y), rel=1e-12)


@pytest.mark.parametrize("shift", [0.0, 1e3, 1e7, 1e12])
def test_r2_of_targets_far_from_zero(shift: float) -> None:
    g = generator(4)
    y = torch.randn(97, generator=g, dtype=torch.float64)
    out, far = y + 0.5 * torch.randn(97, generator=g, dtype=torch.float64), y + shift
    away = out - y  # the same errors, whatever the shift
    wanted = 1 - float(away.square().sum() / (far - far.mean()).square().sum())
    metric = METRICS["r2"]
    assert isinstance(metric, Streamed)
    sums = [metric.sums(one, other) for one, other in zip((far + away).split(10), far.split(10), strict=True)]
    assert metric.value(reduce(metric.joined, sums)) == pytest.approx(wanted, rel=1e-3)
    assert math.isnan(metric(out, torch.full_like(y, 0.1 + shift))), "targets that do not vary have no R2"


def test_metrics_by_name_are_in_records_files_and_results(tmp_path: Path) -> None:
    federation = fedge.Federation(DATA, LISTS)
    run = fedge.train(
        algorithm(), federation, rounds=2, metrics=["f1", "auc"], out=tmp_path / "run", observe=fedge.Observe()
    )
    out = run.scores(DATA.test_x)
    last = run.history[-1]
    assert last["test_f1"] == pytest.approx(plain_f1(out.argmax(1).numpy(), DATA.test_y.numpy(), 10))
    assert last["test_auc"] == pytest.approx(METRICS["auc"](out, DATA.test_y))
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["test_f1"] == pytest.approx(last["test_f1"])
    (row,) = fedge.results(tmp_path / "run")
    assert row["final_f1"] == pytest.approx(last["test_f1"])
    assert [one["test_auc"] for one in fedge.results(tmp_path / "run", per="round")] == [
        pytest.approx(record["test_auc"]) for record in run.history
    ]


def test_functions_and_names_may_be_mixed_and_slips_are_named() -> None:
    federation = fedge.Federation(numbers(1), [range(48)])

    def worst(out: Tensor, y: Tensor) -> Tensor:
        return (out.view(y.shape) - y).abs().max()

    run = fedge.train(fedge.FedAvg(linear(5, 1)), federation, rounds=1, metrics={"off": "rmse", "worst": worst})
    last = run.history[-1]
    assert last["test_off"] == pytest.approx(last["test_mse"] ** 0.5)
    assert last["test_worst"] >= last["test_off"]
    with pytest.raises(ValueError, match=r"metric 'f2' is not known.*: this run .* there are mae, mse, r2, rmse; or"):
        fedge.train(fedge.FedAvg(linear(5, 1)), federation, rounds=1, metrics=["f2"])
    with pytest.raises(ValueError, match="metrics is 'f1', it must be a list of names or a dict of functions"):
        fedge.Observe(metrics="f1")


def test_outputs_are_kept_only_where_a_metric_needs_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "ROOM", 1000)
    federation = fedge.Federation(DATA, LISTS)
    fedge.train(algorithm(), federation, rounds=1, metrics=["f1"])
    with pytest.raises(ValueError, match=r"metrics \['auc'\] are functions of all outputs, which take .* GiB"):
        fedge.train(algorithm(), federation, rounds=1, metrics=["auc"])


def test_a_metric_may_work_in_place() -> None:
    """It has scores and labels of its own: neither later rounds nor other metrics see what it did."""

    def mine(scores: Tensor, labels: Tensor) -> float:
        labels.zero_()
        return float(scores.mul_(1e6).sum())

    def other(scores: Tensor, labels: Tensor) -> float:
        return float(scores.abs().max() + labels.sum())

    plain, mixed = (
        fedge.train(algorithm(), fedge.Federation(DATA, LISTS), rounds=2, seed=0, metrics=metrics)
        for metrics in ({"other": other}, {"mine": mine, "f1": "f1", "other": other})
    )
    for name in ("test_loss", "test_accuracy", "test_other"):
        assert [one[name] for one in mixed.history] == [one[name] for one in plain.history]


# Client by client


def test_every_client_by_itself_on_its_own_examples() -> None:
    kinds = ["phone", "board"] * 6
    federation = fedge.Federation(DATA, LISTS, groups=kinds, names=[f"c{k}" for k in range(12)])
    run = fedge.train(
        algorithm(), federation, rounds=2, metrics=["f1"], observe=fedge.Observe(per_client=True), cohort=4
    )
    rows = fedge.by_client(run, federation, ["f1"])
    assert [row["client"] for row in rows] == [f"c{k}" for k in range(12)]
    for k, row in enumerate(rows):
        mine = federation.examples(k)
        guess = run.predict(DATA.train_x[mine])
        assert row["accuracy"] == pytest.approx(float((guess == DATA.train_y[mine]).double().mean()))
        loss = run.algorithm.losses(run.scores(DATA.train_x[mine]), DATA.train_y[mine]).double().mean()
        assert row["loss"] == pytest.approx(float(loss), rel=1e-5)
        assert row["f1"] == pytest.approx(plain_f1(guess.numpy(), DATA.train_y[mine].numpy(), 10))
        assert row["examples"] == len(mine)
    last = run.history[-1]
    each = [row["accuracy"] for row in rows]
    assert last["train_client_accuracy_mean"] == pytest.approx(np.mean(each))
    assert last["train_client_accuracy_worst_decile"] == pytest.approx(min(each))
    assert last["train_client_accuracy/phone"] == pytest.approx(np.mean(each[::2]))
    assert last["train_client_loss_worst_decile"] == pytest.approx(max(row["loss"] for row in rows))


def test_clients_are_judged_on_their_test_examples_where_these_are_known() -> None:
    owner = np.arange(len(DATA.test_y)) % 5  # clients 5 to 11 have none
    lists = [np.flatnonzero(owner == k) for k in range(12)]
    federation = fedge.Federation(DATA, LISTS, test=lists)
    run = fedge.train(algorithm(), federation, rounds=1, observe=fedge.Observe(per_client=True))
    right = (run.predict(DATA.test_x) == DATA.test_y).double().numpy()
    each = [right[mine].mean() for mine in lists[:5]]
    assert run.history[-1]["test_client_accuracy_mean"] == pytest.approx(np.mean(each))
    assert math.isnan(fedge.by_client(run, federation)[7]["accuracy"])


def test_names_of_clients_are_in_records_and_drops() -> None:
    owner = np.array(["ann", "bob", "eve"])[np.arange(len(DATA.train_y)) % 3]
    federation = fedge.Federation(DATA, fedge.partition.by_group(owner))
    link = fedge.Engine().link(algorithm := fedge.FedAvg(fedge.models.logistic(seed=0), epochs=1), federation)

    def lying(jobs, uploads):
        upload, weight = uploads["train"]
        weight = torch.where(jobs.clients == 1, torch.full_like(weight, torch.nan), weight)
        return {"train": (upload, weight)}

    link.received = lying  # type: ignore[method-assign, assignment, union-attr]
    run = fedge.train(algorithm, federation, rounds=1, link=link)
    assert run.history[0]["cohort_names"] == ["ann", "bob", "eve"]
    assert [drop["name"] for drop in run.history[0]["dropped"]] == ["bob"]


# In a file

FILE = {
    "data": {"name": "digits"},
    "partition": {"kind": "iid", "clients": 5},
    "model": {"name": "logistic"},
    "train": {"rounds": 1, "metrics": ["f1", "auc"], "per_client": True},
    "algorithm": [{"name": "fedavg", "epochs": 1, "loss": "cross_entropy"}],
}


def test_metrics_and_losses_by_name_in_a_file(tmp_path: Path) -> None:
    experiment = parse(FILE)
    (made,) = build(experiment).algorithms.values()
    assert made.loss is fedge.losses.cross_entropy
    compare(experiment, tmp_path)
    (row,) = fedge.results(tmp_path)
    assert 0 < row["final_f1"] <= 1
    assert 0 < row["train_client_accuracy_worst_decile"] <= row["train_client_accuracy_mean"]
    config = next(tmp_path.rglob("config.toml")).read_text()
    assert 'loss = "cross_entropy"' in config
    plain = parse(FILE | {"algorithm": [{"name": "fedavg"}]})
    assert "loss" not in plain.algorithm[0]
    with pytest.raises(
        ExperimentError,
        match=r"loss is 'mes' \(did you mean 'mse'\?\), expected one of 'cross_entropy', .* or .mine.py:function.",
    ):
        parse(FILE | {"algorithm": [{"name": "fedavg", "loss": "mes"}]})
    wrong = FILE["train"] | {"metrics": ["f3"]}  # type: ignore[operator]
    with pytest.raises(
        ExperimentError, match=r"train: metrics is \['f3'\], expected a list of one of 'accuracy', 'auc'"
    ):
        parse(FILE | {"train": wrong})
