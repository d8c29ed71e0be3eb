"""One process at a time writes into a run folder."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import fedge
from fedge.engine import Simulator
from fedge.experiment import compare, load
from fedge.runs import lock
from fedge.runs.folder import RunFolderError
from tests.cases import close, ragged, toy_data, toy_model
from tests.lossy import Slow

ALGORITHM = fedge.FedAvg(toy_model(), lr=0.2, epochs=1, batch_size=4)
TRAIN = """
import sys, fedge
from fedge.engine import Simulator
from tests.cases import ragged, toy_data, toy_model
from tests.lossy import Slow
algorithm, federation = fedge.FedAvg(toy_model(), lr=0.2, epochs=1, batch_size=4), ragged(toy_data())
link = Slow(Simulator(algorithm, federation), float(sys.argv[2]))
fedge.train(algorithm, federation, rounds=400, out=sys.argv[1], link=link, resume=sys.argv[3] == "resume")
"""


def trained(out: Path, rounds: int, **options: Any) -> fedge.Run:
    return fedge.train(ALGORITHM, ragged(toy_data()), rounds=rounds, out=out, **options)


def process(out: Path, delay: float, how: str = "new") -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", TRAIN, str(out), str(delay), how], stderr=subprocess.PIPE)


def until(what: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def test_a_second_resume_is_refused_with_the_process_that_holds_the_folder_until_that_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    holder = process(out, 0.1)
    until(lambda: lines(out / "rounds.jsonl") > 2)
    expected = f"{out} is in use by process {holder.pid} on '{socket.gethostname()}'"
    for again in ({"resume": True}, {}):
        with pytest.raises(RunFolderError, match="is in use by process") as refused:
            trained(out, 400, **again)
        assert str(refused.value).startswith(expected)
    other = process(out, 0, "resume")
    _, error = other.communicate(timeout=60)
    assert other.returncode
    assert f"is in use by process {holder.pid}" in error.decode()
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert (out / ".lock").exists()  # and yet it is free
    rounds = lines(out / "rounds.jsonl") + 3
    resumed = trained(out, rounds, resume=True)
    numbers = [json.loads(line)["round"] for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert numbers == list(range(1, rounds + 1))
    assert close(resumed.params, fedge.train(ALGORITHM, ragged(toy_data()), rounds=rounds).params) == 0


def test_the_lock_is_given_back_at_the_end_and_after_errors(tmp_path: Path) -> None:
    trained(tmp_path / "a", 2)
    assert not (tmp_path / "a" / ".lock").exists()
    trained(tmp_path / "a", 3, resume=True)
    with pytest.raises(RunFolderError, match="already holds a run"):
        trained(tmp_path / "a", 3)
    with pytest.raises(RunFolderError, match="has 3 rounds already"):
        trained(tmp_path / "a", 2, resume=True)
    assert not (tmp_path / "a" / ".lock").exists()
    trained(tmp_path / "a", 4, resume=True)


def test_two_runs_of_one_process_do_not_share_a_folder(tmp_path: Path) -> None:
    federation, stop = ragged(toy_data()), threading.Event()
    link = Slow(Simulator(ALGORITHM, federation), 0.05)
    options = {"rounds": 1000, "out": tmp_path / "a", "link": link, "stop": stop.is_set}
    first = threading.Thread(target=lambda: fedge.train(ALGORITHM, federation, **options))
    first.start()
    try:
        until(lambda: lines(tmp_path / "a" / "rounds.jsonl") > 0)
        with pytest.raises(RunFolderError, match=f"in use by process {os.getpid()}"):
            trained(tmp_path / "a", 1000, resume=True)
    finally:
        stop.set()
        first.join()
    rounds = lines(tmp_path / "a" / "rounds.jsonl")
    assert trained(tmp_path / "a", rounds + 1, resume=True).rounds == rounds + 1


def test_an_experiment_is_resumed_once_at_a_time(tmp_path: Path) -> None:
    """Also while a later algorithm is at work: finished runs are not opened again by the second one."""
    experiment = load(None, ["train.rounds=2"])
    with lock.locked(tmp_path), pytest.raises(RunFolderError, match=f"{tmp_path} is in use by process {os.getpid()}"):
        compare(experiment, tmp_path, resume=True)
    assert list(tmp_path.iterdir()) == []


# File systems without flock: the file alone decides


@pytest.fixture(params=["no flock", "no locks on this file system"])
def without_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no flock":
        monkeypatch.setattr(lock, "fcntl", None)
        return

    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)


def left(folder: Path, **holder: Any) -> None:
    (folder / ".lock").write_text(json.dumps(holder))


@pytest.mark.usefixtures("without_flock")
def test_without_flock_the_file_says_who_holds_the_folder(tmp_path: Path) -> None:
    with lock.locked(tmp_path):
        with pytest.raises(lock.Held, match=f"in use by process {os.getpid()} on"), lock.locked(tmp_path):
            pass
        assert (tmp_path / ".lock").exists()
    assert not (tmp_path / ".lock").exists()


@pytest.mark.usefixtures("without_flock")
def test_without_flock_dead_processes_of_this_machine_are_found_dead(tmp_path: Path) -> None:
    here, gone = socket.gethostname(), subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left(tmp_path, pid=gone.pid, host=here, started=5)
    with lock.locked(tmp_path):
        pass
    left(tmp_path, pid=os.getpid(), host=here, started=-1)  # the number is in use again
    with lock.locked(tmp_path):
        pass
    for torn in (b"\0torn", b"[" * 100_000):
        (tmp_path / ".lock").write_bytes(torn)
        with lock.locked(tmp_path):
            pass
    left(tmp_path, pid=gone.pid, host="another", started=5)
    with (
        pytest.raises(lock.Held, match=r"process \d+ on 'another': wait for it or end it; if there is none, remove"),
        lock.locked(tmp_path),
    ):
        pass


def test_a_lock_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".lock").symlink_to(precious)
    with pytest.raises(RunFolderError, match="cannot write to"):
        trained(tmp_path / "a", 1)
    assert precious.read_text() == "mine"
