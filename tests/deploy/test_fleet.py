"""How a fleet ends and what it leaves, without a SuperLink: stale folders, second signals, silence, late work."""

from __future__ import annotations

import contextlib
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
from fedge.deploy import local, standin
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


@pytest.mark.parametrize("done", [False, True])
def test_an_app_that_is_told_to_end_still_answers(done: bool) -> None:
    """Flower's own handler would end it without an answer, and its SuperNode would wait for one for ever."""

    def handler(head: dict[str, Any], blobs: dict[str, bytes], context: Context) -> RecordDict:
        if not done:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        return pack({"fine": True})

    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
    try:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
        reply = _answering(handler)(Message(pack({}), 1, "train.work", ttl=60.0), context)
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        head, _ = unpack(reply.content)
        assert ("told to end (SIGTERM)" in head.get("error", "")) != done
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_server_app_keeps_its_output_hides_its_token_and_ends_with_its_superexec(tmp_path: Path) -> None:
    """Here the SuperExec is a shell that is killed with -9, and the server app a program that tells what it sees."""
    real, log = tmp_path / "bin/flwr-serverapp", tmp_path / "serverapp.log"
    real.parent.mkdir()
    tell = (
        "import sys, time\nplace = sys.argv.index('--token-file')\nprint('token', open(sys.argv[place + 1]).read())\n"
    )
    real.write_text(f"#!{sys.executable}\n{tell}print('no such module', file=sys.stderr, flush=True)\ntime.sleep(60)\n")
    real.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(tmp_path / "bin/python"))
        standin.install(tmp_path / "programs", log)
    program = tmp_path / "programs/flwr-serverapp"
    program.write_text(program.read_text().replace(str(tmp_path / "bin/python"), sys.executable))
    shell = Process(
        "shell", ["sh", "-c", f"{program} --token s3cret --insecure & wait"], os.environ, tmp_path / "sh.log"
    )
    try:
        end = time.monotonic() + 20
        while "no such module" not in (log.read_text() if log.exists() else ""):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert "token s3cret" in log.read_text()
        assert log.stat().st_mode & 0o077 == 0
        (words,) = running(str(real)).values()
        assert "s3cret" not in words
        os.kill(shell.pid, signal.SIGKILL)
        end = time.monotonic() + 5
        while running(str(real)):
            assert time.monotonic() < end, "it outlives its SuperExec"
            time.sleep(0.05)
    finally:
        shell.signal(signal.SIGKILL)
        shell.reap(1)


def test_the_recipe_for_a_server_keeps_its_files_to_itself(tmp_path: Path) -> None:
    """The lines of docs/deploy.md, with a stand-in for the SuperLink that makes its database as SQLite does."""
    page = (Path(__file__).parents[2] / "docs/deploy.md").read_text()
    lines = page[page.index("    umask 077\n") : page.index("**3. The connection")].replace("\\\n", " ").splitlines()
    commands = [line.strip() for line in lines if line.strip()]
    (link,) = [line for line in commands if line.startswith("flower-superlink ")]
    (executor,) = [line for line in commands if "flower-superexec " in line]
    made, log = tmp_path / "fleet-server", tmp_path / "log/serverapp.log"
    first = "\n".join(commands[: commands.index(link)]).replace("/run/fleet-server", str(made))
    first = first.replace("/var/log/fleet/serverapp.log", str(log)).replace("python ", f"{sys.executable} ")
    database = link.partition("--database ")[2].split()[0]
    write = f"{sys.executable} -c \"import sqlite3; sqlite3.connect('{database}').execute('create table a (b)')\""
    subprocess.run(["sh", "-ec", f"{first}\n{write}"], cwd=tmp_path, check=True)
    for path in (tmp_path / database, tmp_path / "superexec.secret", made, made / "flwr-serverapp"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert executor.startswith("PATH=/run/fleet-server:$PATH ")
    assert all("--superexec-auth-secret-file superexec.secret" in line for line in (link, executor))


def running(words: str) -> dict[int, str]:
    """Processes with these words on their command line, other than shells."""
    found = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode() if folder.name.isdigit() else ""
            if words in line and not line.startswith("sh "):
                found[int(folder.name)] = line
    return found
