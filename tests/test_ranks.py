"""Several processes train as one does: the same model, the same bytes, one folder, one voice."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedge.cli.app import app
from fedge.cli.torchrun import program
from fedge.engine import Group, Ranks, Simulator, joined
from fedge.engine.ranks import process_group as group
from fedge.engine.ranks.process_group import threads_of_a_rank
from fedge.runs import checkpoint
from tests.cases import cases as parametrised
from tests.cases import close
from tests.ranks_worker import cases, train

ROOT = Path(__file__).parent.parent
NAMES = list(cases())
SHORT = {  # of the rest, `make test-all` has all
    "fedavg", "fedavg on pictures", "scaffold", "feddane", "feddane, one client", "fedova, fisher l-bfgs",
    "data sharing", "robust_fedova", "compressed_top", "fedova_compressed", "robust_compressed", "bad clients",
    "several inputs", "clipped fednova", "search, BoundedMean", "search, ClippedMean",
}  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of two processes has found, and the folder they had."""
    names = NAMES if request.config.getoption("--all-cases") else sorted(SHORT)
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [sys.executable, "-m", "tests.ranks_worker", str(folder), *names]
    started = [
        subprocess.Popen(words, cwd=ROOT, env={**ENVIRONMENT, **where, "RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]
    try:
        assert [process.wait(timeout=600) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") | {"folder": folder} for rank in (0, 1)]


def nearly(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, with fractions up to the rounding of sums in another order."""
    return [
        {name: pytest.approx(value, rel=1e-9) if isinstance(value, float) else value for name, value in one.items()}
        for one in records
    ]


@pytest.mark.parametrize("name", parametrised(SHORT, NAMES))
def test_two_processes_train_as_one(name: str, both: list[dict[str, Any]]) -> None:
    alone = train(name, Simulator)
    for found in (one[name] for one in both):
        assert close(found["params"], alone["params"]) < 1e-10
        assert found["ledger"] == alone["ledger"]
        assert found["records"] == nearly(alone["records"])  # cohorts, and who was dropped and why, in the same order
    assert close(both[0][name]["params"], both[1][name]["params"]) == 0


def test_what_clients_of_several_ranks_remember_is_in_the_checkpoint(both: list[dict[str, Any]]) -> None:
    alone = train("fedova_compressed", Simulator)
    for found in both:
        assert close(found["resumed"]["params"], found["fedova_compressed"]["params"]) == 0
        assert found["resumed"]["ledger"] == alone["ledger"]


def test_the_bad_clients_are_on_both_ranks() -> None:
    """Else the case above shows less than it seems to."""
    algorithm, federation, _ = cases()["bad clients"]
    link = Ranks(algorithm, federation, group=Pair())
    clients = torch.arange(federation.clients)
    link._deal([link.simulator.directory.jobs(clients, link.simulator.tasks["train"], None)])
    assert {link._owner[client] for client in (0, 4, 5)} == {0, 1}


class Pair(Group):
    size = 2


def test_work_is_dealt_out_evenly_and_clients_stay_where_they_are() -> None:
    algorithm, federation, _ = cases()["fedavg"]
    link = Ranks(algorithm, federation, group=Pair())
    task = link.simulator.tasks["train"]
    some, all_ = torch.arange(5), torch.arange(federation.clients)
    link._deal([link.simulator.directory.jobs(some, task, None)])
    first = dict(link._owner)
    link._deal([link.simulator.directory.jobs(all_, task, None)])
    assert first.items() <= link._owner.items()
    assert len(link._owner) == federation.clients
    sizes = link.simulator.population.sizes(all_)
    assert sum(link._load) == int(sizes.sum())
    link.forget()
    link._deal([link.simulator.directory.jobs(all_, task, None)])
    assert max(link._load) <= 7 / 6 * int(sizes.sum()) / 2  # what is known of "largest first" on two machines


def test_one_sum_a_phase(both: list[dict[str, Any]]) -> None:
    rows = both[0]["fedova, fisher l-bfgs"]["ledger"]
    phases = {(row["round"], row["phase"]) for row in rows if row["round"]}
    assert both[0]["sums"] == both[1]["sums"] == len(phases)


def test_a_wish_to_stop_on_one_rank_stops_all_after_the_same_phase(both: list[dict[str, Any]]) -> None:
    for found in (one["stop"] for one in both):
        assert found["stopped"]
        assert len(found["records"]) == 1
    assert close(both[0]["stop"]["params"], both[1]["stop"]["params"]) == 0


def test_a_failure_on_one_rank_is_told_on_all(both: list[dict[str, Any]]) -> None:
    assert both[0]["failure"].startswith("RankError: rank 1: ")
    assert not both[1]["failure"].startswith("RankError")
    assert all("ZeroDivisionError" in one["failure"] and "a bug on one machine" in one["failure"] for one in both)


def test_rank_0_alone_evaluates_and_writes(both: list[dict[str, Any]]) -> None:
    assert [one["evaluated"] for one in both] == [[True, True], [False, False]]
    assert [one["told"] for one in both] == [[1, 2], []]
    assert (both[0]["folder"] / "run-0" / "summary.json").is_file()
    assert not (both[0]["folder"] / "run-1").exists()


def test_a_process_alone_is_a_group_of_one() -> None:
    with joined(environment={}) as group:
        algorithm, federation, _ = cases()["fedavg"]
        ranks = train("fedavg", lambda a, f: Ranks(a, f, group=group))
    assert close(ranks["params"], train("fedavg", Simulator)["params"]) < 1e-12
    with pytest.raises(ValueError, match=r"no process group: use .*joined"):
        Ranks(algorithm, federation)


def test_cores_are_shared_out_unless_somebody_chose() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert threads_of_a_rank({"LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}) == cores
    assert threads_of_a_rank({"LOCAL_WORLD_SIZE": str(cores)}) == 1
    assert threads_of_a_rank({"LOCAL_WORLD_SIZE": "1000"}) == 1
    assert threads_of_a_rank({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "3"}) == 3


def test_the_command_that_goes_on_is_the_one_that_was_typed() -> None:
    assert program({}) == "fedge"
    assert program({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}) == "torchrun --nproc-per-node 2 -m fedge"
    assert program({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}) == "torchrun ... -m fedge"


# The command line

EXPERIMENT = """
name = "small"
[data]
name = "digits"
[partition]
kind = "labels_per_client"
clients = 30
labels = 2
[model]
name = "mlp"
hidden = [8]
[train]
rounds = 3
cohort = 10
checkpoint_every = 1000
device = "cpu"
[[algorithm]]
name = "fedova"
label = "FedOVA"
[algorithm.inner]
name = "fedavg"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(EXPERIMENT)
    return tmp_path


def torchrun(*words: str) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fedge", "run"]
    return [sys.executable, *launch, *words, "--no-report"]


def alone(*words: str) -> str:
    done = CliRunner().invoke(app, ["run", *words, "--no-report"])
    assert done.exit_code == 0, done.output
    return done.output


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]


def assert_same(one: Path, other: Path) -> None:
    """Equal to the rounding of float32."""
    assert (one / "ledger.jsonl").read_bytes() == (other / "ledger.jsonl").read_bytes()
    for a, b in zip(records(one), records(other), strict=True):
        assert a["cohort"] == b["cohort"]
        assert a["test_loss"] == pytest.approx(b["test_loss"], abs=1e-5)


def test_torchrun_writes_one_folder_and_prints_once(here: Path) -> None:
    done = subprocess.run(torchrun("small.toml"), env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("round 3/3") == 1
    assert len(re.findall("^FedOVA .*$", done.stdout, re.MULTILINE)) == 1  # the table
    assert [path.name for path in (here / "runs").iterdir()] == ["small"]
    alone("small.toml", "--out", "alone")
    assert_same(here / "runs/small/fedova", here / "alone/fedova")


def ranks_of(parent: int) -> dict[int, int]:
    """Rank -> process, of what a torchrun started."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            above = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
            rank = re.search(rb"\0RANK=(\d+)\0", (process / "environ").read_bytes())
        except OSError:
            continue
        if above == parent and rank:
            found[int(rank[1])] = int(process.name)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_dead_rank_ends_the_run_which_goes_on_from_its_last_round(here: Path) -> None:
    words = torchrun("small.toml", "--out", "torn", "--set", "train.rounds=100000")
    run = here / "torn/fedova"
    with subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as one:
        try:
            limit = time.monotonic() + 60
            while not (run / "rounds.jsonl").is_file() or len(records(run)) < 3:
                assert time.monotonic() < limit
                assert one.poll() is None
                time.sleep(0.05)
            os.kill(ranks_of(one.pid)[1], signal.SIGKILL)
            _, err = one.communicate(timeout=40)
        finally:
            one.terminate()  # torchrun ends what is left of its ranks
    assert one.returncode == 1
    (line,) = [line for line in err.splitlines() if line.startswith("Error: ")]
    assert "another process of this run died" in line
    assert "torchrun --nproc-per-node 2 -m fedge run --resume --out torn" in line
    had = len(records(run))
    assert had >= 3
    assert checkpoint.load(run / "checkpoint.pt")["round"] == had  # though none was due
    alone("--resume", "--out", "torn", "--set", f"train.rounds={had + 1}")
    more = torchrun("--resume", "--out", "torn", "--set", f"train.rounds={had + 2}")
    done = subprocess.run(more, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"going on after round {had + 1}") == 1
    alone("small.toml", "--out", "whole", "--set", f"train.rounds={had + 2}")
    assert_same(run, here / "whole/fedova")


@pytest.mark.parametrize("drops", [True, False])
def test_leaving_waits_until_the_last_message_is_let_go(drops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a thread of gloo's may ask for an interpreter that is gone, and the process aborts after a good run."""
    held: list[torch.Tensor] = []

    def broadcast(tensor: torch.Tensor, src: int) -> None:
        held.append(tensor)
        if drops:
            threading.Timer(0.3, held.clear).start()

    monkeypatch.setattr(group, "LET_GO", 10 if drops else 0.1)
    monkeypatch.setattr(group.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(group.dist, "broadcast", broadcast)
    monkeypatch.setattr(group.dist, "destroy_process_group", lambda: None)
    begin = time.monotonic()
    group.Processes.leave(object.__new__(group.Processes))
    assert bool(held) != drops
    assert time.monotonic() - begin < 5
