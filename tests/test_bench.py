"""The benchmark measures what it says, and the engines' check runs."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.speed import page
from fedge.bench import WORKLOADS, Timing, plain_round
from fedge.bench.check import NAMES, SETTINGS, check
from fedge.bench.flops import flops
from fedge.cli.app import app
from fedge.engine.uploads.streaming import Sums
from tests.cases import cases


def test_bench_prints_figures() -> None:
    done = CliRunner().invoke(app, ["bench", "b", "--repeats", "2", "--device", "cpu", "--json"])
    assert done.exit_code == 0, done.output
    (timing,) = json.loads(done.stdout)["timings"]
    assert timing["workload"] == "B"
    assert len(timing["seconds"]) == len(timing["plain"]) == 2
    assert timing["ratio"] > 0
    assert timing["flops"] == 5 * sum(timing_examples(20)) * (2 * (64 * 32 + 32 * 10) * 2 + 2 * 32 * 10)
    assert 0 <= timing["outside"] < 1
    assert timing["flops_a_second"] == timing["flops"] / timing["median"]


def timing_examples(cohort: int) -> list[int]:
    _, federation = WORKLOADS["B"].build(False)
    return [len(federation.examples(client)) for client in range(cohort)]


def test_an_unknown_workload_is_one_line() -> None:
    done = CliRunner().invoke(app, ["bench", "Q", "--device", "cpu"])
    assert done.exit_code == 2
    assert "workload is 'Q'" in done.output


def test_the_ratio_is_of_medians() -> None:
    timing = Timing("A", "cpu", [3.0, 1.0, 2.0], [10.0, 30.0, 20.0], 0.0, 1, 1)
    assert (timing.median, timing.ratio) == (2.0, 10.0)


@pytest.mark.parametrize("name", ["B", "FA"])
def test_the_plain_loop_does_the_same_work(name: str) -> None:
    """One update a job and step: as many as the engine takes."""
    algorithm, federation = WORKLOADS[name].build(False)
    inner = getattr(algorithm, "inner", algorithm)
    clients = torch.arange(2)
    steps = 0
    step = torch.optim.SGD.step

    def counting(self, *args, **kwargs):
        nonlocal steps
        steps += 1
        return step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", counting)
        plain_round(algorithm, federation, clients, torch.device("cpu"))()
    jobs = 2 if name == "FA" else 1
    wanted = sum(inner.epochs * -(-int(federation.sizes[k]) // inner.batch_size) for k in range(2))
    assert steps == jobs * wanted


# Momentum, memory, products of the curvature, and rows with curvature.
SHORT = {"fedavg momentum", "scaffold", "fisher l-bfgs, product", "fedova, fisher l-bfgs"}


@pytest.mark.parametrize("name", cases(SHORT, NAMES))
def test_engines_agree(name: str) -> None:
    """Float64, three rounds, to 1e-10; single precision, five local steps from one point, to 1e-5."""
    found = list(check("cpu", [name]))
    assert len(found) == 20
    assert [gap for gap in found if not gap.agrees or gap.moved < 1e-3] == []


def test_an_engine_that_errs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    average = Sums._sum
    monkeypatch.setattr(Sums, "_sum", lambda self, *args: average(self, *args) * (1 + 1e-3 * (len(args[0]) > 1)))
    monkeypatch.setattr(sys.modules[check.__module__], "SETTINGS", SETTINGS[1:])
    agree = {gap.engine: gap.agrees for gap in check("cpu", ["fedavg"])}
    assert agree["one by one"]
    assert not agree["stacked"]


def test_the_pages_of_the_figures_are_up_to_date() -> None:
    """After new figures: python -m benchmarks.speed."""
    assert (page.HERE / "README.md").read_text("utf-8") == page.page()
    assert page.README.read_text("utf-8") == page.readme()


def test_arithmetic_is_counted_by_hand() -> None:
    """MLP 64-32-10: forwards 2 (64 32 + 32 10), backwards the weights' share again and the second layer's input."""
    algorithm, federation = WORKLOADS["C"].build(False)
    one = 2 * (64 * 32 + 32 * 10) * 2 + 2 * 32 * 10
    assert flops(algorithm, federation, 200) == 200 * 14 * one
    assert flops(*WORKLOADS["G"].build(False), 20) is None
