"""Several runs at a time: the same results as one after another, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedge.cli.app import app
from fedge.experiment import ExperimentError
from fedge.reproduce import Campaign, Choices, Job, Stopped, Store, jobs
from fedge.reproduce.pool import LostWorker, together
from fedge.reproduce.tuning import TRIALS

from . import paper


def reproduce(out: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["reproduce", *options, "--dataset", "fmnist", "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 0, done.output
    return done.output


def test_several_at_a_time_give_what_one_after_another_gives(tiny: Path, tmp_path: Path) -> None:
    what = ("tune", "noniid", "clients", "--rounds", "2", "--seeds", "1")
    reproduce(tmp_path / "one", *what)
    said = reproduce(tmp_path / "two", *what, "--jobs", "2")
    for name in ("results.jsonl", TRIALS):
        assert paper.untimed(tmp_path / "two" / name) == paper.untimed(tmp_path / "one" / name)
    for name in ("noniid-fmnist.md", "clients-fmnist.md"):
        pages = [(tmp_path / folder / name).read_text("utf-8") for folder in ("one", "two")]
        assert len({page.split("| cell |")[0] for page in pages}) == 1
    assert said.count("noniid fmnist-l2, FedOVA, seed 0") == 1
    assert "chosen for fmnist, FedOVA" in said
    assert not list((tmp_path / "two" / "runs").iterdir())
    assert "was done" not in reproduce(tmp_path / "two", *what, "--jobs", "2"), "nothing is left to say"


def test_what_diverges_gives_way_to_the_next_best(tiny: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / TRIALS)
    trials = [{"setting": {"lr": lr}, "rounds": 60, "validation": v} for lr, v in ((1e30, 0.8), (0.1, 0.7))]
    choice = {"kind": "choice", "key": "a", "dataset": "fmnist", "method": "FedAvg", "setting": {"lr": 1e30}}
    store.add({**choice, "trials": trials})
    assert len(Choices([store.path])("fmnist", "FedAvg")) == 2
    reproduce(tmp_path, "noniid", "--rounds", "2", "--seeds", "2", "--method", "FedAvg", "--jobs", "2")
    assert "choice 2" in (tmp_path / "noniid-fmnist.md").read_text("utf-8")


def test_a_wish_to_stop_reaches_all_and_it_goes_on(tiny: Path, tmp_path: Path) -> None:
    wanted, seen = jobs("noniid", "fmnist", [0], 40), list[Job]()
    campaign = Campaign(tmp_path / "some", "cpu", stop=lambda: bool(seen))
    with pytest.raises(Stopped):
        together(campaign, wanted, 2, lambda job, line: seen.append(job))
    assert seen
    assert len(campaign.store.lines) < len(wanted)
    campaign.stop = lambda: False
    together(campaign, [job for job in wanted if campaign.store.find(job.key) is None], 2)
    whole = Campaign(tmp_path / "whole", "cpu")
    together(whole, wanted, 2)
    assert len(whole.store.lines) == len(wanted)
    assert paper.untimed(tmp_path / "some" / "results.jsonl") == paper.untimed(tmp_path / "whole" / "results.jsonl")


def test_one_that_fails_stops_the_others_and_says_why(tiny: Path, tmp_path: Path) -> None:
    first, *others = jobs("noniid", "fmnist", [0], 10_000)
    wrong = Job(**vars(first) | {"config": first.config | {"partition": {**first.config["partition"], "labels": 11}}})
    with pytest.raises(ExperimentError, match="11"):
        together(Campaign(tmp_path, "cpu"), [wrong, *others], 2)


def test_a_process_that_was_killed_is_named(tiny: Path, tmp_path: Path) -> None:
    def kill(*_: object) -> None:
        os.kill(active_children()[0].pid or 0, signal.SIGKILL)

    wanted = [*jobs("noniid", "fmnist", [0], 1)[:1], *jobs("noniid", "fmnist", [0], 10_000)]
    with pytest.raises(LostWorker, match="ended without a word"):
        together(Campaign(tmp_path, "cpu"), wanted, 2, kill)


def test_processes_end_with_the_one_that_began_them(at_work: subprocess.Popen[bytes]) -> None:
    children = Path(f"/proc/{at_work.pid}/task/{at_work.pid}/children").read_text().split()
    assert len(children) >= 2
    at_work.kill()
    _until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def test_a_second_interrupt_ends_all_at_once(at_work: subprocess.Popen[bytes]) -> None:
    at_work.send_signal(signal.SIGINT)
    at_work.send_signal(signal.SIGINT)
    assert at_work.wait(20) == 130


def test_one_interrupt_stops_all_with_a_checkpoint(at_work: subprocess.Popen[bytes], tmp_path: Path) -> None:
    at_work.send_signal(signal.SIGINT)
    assert at_work.wait(20) == 130
    assert at_work.stdout is not None
    assert b"the same command goes on from here" in at_work.stdout.read()
    assert len(list(tmp_path.glob("out/runs/*/checkpoint*"))) == 2


@pytest.fixture
def at_work(tiny: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command with two runs that would take hours, both begun."""
    out = tmp_path / "out"
    what = ["reproduce", "noniid", "--rounds", "100000", "--seeds", "1", "--device", "cpu", "--jobs", "2"]
    with subprocess.Popen([sys.executable, "-m", "fedge", *what, "--out", str(out)], stdout=subprocess.PIPE) as process:
        try:
            _until(lambda: len(list(out.glob("runs/*/rounds.jsonl"))) == 2)
            yield process
        finally:
            process.kill()


def _until(true: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)
