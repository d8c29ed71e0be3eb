"""How a fleet ends and what it leaves, without a SuperLink: stale folders, second signals, silence, late work."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedge.deploy import fleet as fleet_module
from fedge.deploy import local
from fedge.deploy.client import _answering
from fedge.deploy.envelope import pack, unpack
from fedge.deploy.fleet import Fleet, FleetError
from fedge.deploy.folder import fleet_folder, sweep
from fedge.deploy.keys import make_keys
from fedge.deploy.process import Process
from fedge.deploy.tls import shows_certificate_of
from fedge.experiment import Watch
from tests.deploy.processes import quiet

HOLD = """
import time
from fedge.deploy.folder import fleet_folder
with fleet_folder() as folder:
    (folder / "node-0.key").write_text("secret")
    print(folder, flush=True)
    time.sleep(60)
"""


def test_the_folder_of_a_killed_owner_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    env = quiet(tmp_path / "home") | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", HOLD], env=env, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        sweep()
        assert (folder / "node-0.key").exists(), "its owner lives"
        owner.kill()
    assert folder.exists()
    (tmp_path / "fedge-fleet-not-ours").mkdir()  # nobody ever owned it: somebody else's affair
    with fleet_folder() as mine:
        assert not folder.exists()
        sweep()
        assert mine.exists()
    assert [path.name for path in tmp_path.glob("fedge-fleet-*")] == ["fedge-fleet-not-ours"]


def test_the_key_of_the_ca_is_not_kept(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", ["127.0.0.1"], 1, keep_ca_key=False)
    assert keys.ca.exists()
    assert not keys.ca_key.exists()


SLOW = "import signal, sys, time\nsignal.signal(15, lambda *_: (time.sleep(1), sys.exit()))\nprint('up', flush=True)\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_second_signal_does_not_end_the_stopping(tmp_path: Path, number: signal.Signals) -> None:
    def end(*_: object) -> None:
        raise SystemExit(1)

    fleet, before = Fleet(tmp_path, 1), signal.signal(number, end)
    process = Process("node-0", [sys.executable, "-c", SLOW + "time.sleep(60)"], os.environ, tmp_path / "log")
    fleet.processes["node-0"] = process
    try:
        while "up" not in process.last_words():
            time.sleep(0.05)
        again = threading.Timer(0.3, os.kill, (os.getpid(), number))
        again.start()
        fleet.stop()
        again.join()
        assert not process.alive
        assert not fleet.processes
        assert signal.getsignal(number) is end
    finally:
        signal.signal(number, before)
        process.signal(signal.SIGKILL)


def test_a_stranger_on_the_port_is_not_the_superlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever listens: it must show the certificate that was made for this fleet."""
    keys = make_keys(tmp_path / "keys", ["127.0.0.1"], 1)
    fleet = Fleet(tmp_path, 1)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        fleet.port = stranger.getsockname()[1]
        assert not shows_certificate_of("127.0.0.1", fleet.port, keys.ca)
        fleet.processes["superlink"] = Process("superlink", ["true"], os.environ, tmp_path / "log")
        with pytest.raises(FleetError, match=f"ended at once, and another program has taken port {fleet.port}"):
            fleet._until(lambda: shows_certificate_of("127.0.0.1", fleet.port, keys.ca), "superlink", 10)
    fleet.stop()


def silent_fleet(folder: Path, failures: int) -> Any:
    """Flower fails to say how the run goes so many times; then the server app is done."""
    calls = []

    def status(run: int) -> str:
        calls.append(run)
        if len(calls) > failures:
            done = {"event": "done", "label": "", "progress": None, "error": None}
            (folder / "events.jsonl").write_text(json.dumps(done) + "\n")
            return "running"
        raise FleetError("`flwr list` failed: too busy")

    return SimpleNamespace(folder=folder, status=status, gone=list, calls=calls)


def test_a_busy_moment_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SILENCE", 0.0)
    fleet = silent_fleet(tmp_path, local.MISSES - 1)
    assert local.follow(fleet, 7, Watch(), lambda: False).done
    assert len(fleet.calls) == local.MISSES


def test_a_superlink_that_never_answers_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SILENCE", 0.0)
    fleet = silent_fleet(tmp_path, local.MISSES)
    with pytest.raises(FleetError, match="too busy"):
        local.follow(fleet, 7, Watch(), lambda: False)
    assert len(fleet.calls) == local.MISSES


@pytest.mark.parametrize(
    ("body", "message"), [("sleep 5", "`flwr list fleet` did not end within 0.3 s"), ("echo '{no}'", "failed: {no}")]
)
def test_what_flowers_command_does_wrong_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    fake = tmp_path / "flwr"
    fake.write_text(f"#!/bin/sh\nexec {body}\n")
    fake.chmod(0o700)
    monkeypatch.setattr(fleet_module, "_program", lambda name: str(fake))
    with pytest.raises(FleetError, match=message):
        Fleet(tmp_path, 1).flwr("list", "fleet", seconds=0.3)


@pytest.mark.parametrize("late", [False, True])
def test_what_is_remembered_too_late_is_forgotten(late: bool) -> None:
    """Flower may be writing the state down by then."""
    go, over = threading.Event(), threading.Event()

    def handler(head: dict[str, Any], blobs: dict[str, bytes], context: Context) -> RecordDict:
        if late:
            go.wait(10)
        context.state["new"] = ConfigRecord({"a": 1})
        over.set()
        return pack({"fine": True})

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    context = Context(1, 1, {}, RecordDict({"old": ConfigRecord({"a": 0})}), {})
    message = Message(pack({}), 1, "train.work", ttl=0.4 if late else 60.0)
    head, _ = unpack(_answering(handler)(message, context).content)
    go.set()
    assert over.wait(10)
    time.sleep(0.1)
    assert ("took longer than" in head.get("error", "")) == late
    assert set(context.state) == ({"old"} if late else {"old", "new"})
