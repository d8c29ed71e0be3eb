"""A whole Flower deployment on the loop-back address: SuperLink, SuperExec, SuperNodes, with TLS and node keys."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from fedge.deploy import standin
from fedge.deploy.keys import Keys, make_keys, write_secret
from fedge.deploy.process import Process, free_port, last_words, listens, stop_all, undisturbed
from fedge.deploy.tls import shows_certificate_of
from fedge.deploy.warm import install

HOST = "127.0.0.1"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # how long a message waits at its node for a process; Flower: 1 s
}
PATIENCE = 120.0  # seconds for one command of Flower's
NAME = "fleet"  # of the connection, in Flower's configuration
SERVER = "serverapp"  # what its log is called: it is not a process of ours, the SuperExec starts it


class FleetError(RuntimeError):
    """A part of the fleet did not start or did not do as it was told; says which, and its last words."""


class Fleet:
    """Started when entered, stopped with all its processes when left. `folder` holds keys, database and logs.

    The SuperLink does not start apps itself (`--isolation process`) and keeps a database, so that it can be killed and
    started again under a run; each node has its own home, port and key. `warm` is how apps start (see `warm.py`), and
    `environment` is for all parts.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int,
        say: Callable[[str], None] = lambda line: None,
        *,
        warm: bool = True,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.folder, self.nodes, self.say = folder.resolve(), nodes, say
        self.warm, self.environment = warm, environment
        self.port = free_port()
        self.processes: dict[str, Process] = {}
        self.keys: Keys | None = None

    def __enter__(self) -> Fleet:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        self.start_parts(self.nodes)
        self.say(f"The SuperLink is at {self.address}, with TLS and node keys")

    def start_parts(self, online: int) -> None:
        """All keys are registered; so many of the nodes are started."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.keys = make_keys(self.folder / "keys", [HOST, "localhost"], self.nodes, keep_ca_key=False)
        write_secret(self._secret, secrets.token_bytes(32))
        self._write_connection()
        if self.warm:
            self.start_warm()
        self.start_superlink()
        self.start_superexec()
        for number in range(self.nodes):
            self.register(self.keys.node(number))
        for number in range(online):
            self.start_node(number)

    def start_superlink(self) -> None:
        """Also after it was killed: same port, same database."""
        command = ["flower-superlink", "--isolation", "process", "--enable-supernode-auth"]
        command += ["--host", HOST, "--port", str(self.port), "--database", str(self.folder / "superlink.db")]
        command += [*self._server_files(), *self._secret_file(), "--disable-runtime-dependency-installation"]
        self._spawn("superlink", command)
        self._until(lambda: shows_certificate_of(HOST, self.port, self.known_keys.ca), "superlink", 60)

    def start_warm(self) -> None:
        """One process for all nodes of this machine; each of their apps is a fork of it."""
        install(self.folder / "warm")
        self._spawn("warm", [sys.executable, "-m", "fedge.deploy.warm", str(self.folder / "warm")])

    def start_superexec(self) -> None:
        standin.install(self.folder / "programs", self._log(SERVER))
        command = ["flower-superexec", "--runtime-api-address", self.address]
        self._spawn("superexec", [*command, "--root-certificates", str(self.known_keys.ca), *self._secret_file()])

    def start_node(self, number: int, partition: int | None = None) -> None:
        """Start node `number` as client `partition` (by default the same number), also again after it was killed."""
        config = f"partition-id={number if partition is None else partition} num-partitions={self.nodes}"
        command = ["flower-supernode", "--superlink", self.address, "--root-certificates", str(self.known_keys.ca)]
        command += ["--auth-supernode-private-key", str(self.known_keys.node(number)), "--node-config", config]
        self._spawn(f"node-{number}", [*command, "--host", HOST, "--port", str(free_port())])

    def register(self, key: Path) -> None:
        """Let a node in: its public key becomes known to the SuperLink."""
        self.flwr("supernode", "register", str(key.with_name(f"{key.name}.pub")), NAME)

    def submit(self, app: Path, config: Mapping[str, Any]) -> int:
        """Start a run of this app and return its id."""
        words = [f"{key}={json.dumps(value)}" for key, value in config.items()]
        found = self.flwr("run", str(app), NAME, "--run-config", " ".join(words))
        return int(found["run-id"])

    def status(self, run: int) -> str:
        """What Flower says about a run, such as running or finished:completed."""
        return str(self.traffic(run)["status"])

    def traffic(self, run: int) -> dict[str, Any]:
        """A run as the SuperLink has it on record, its bytes among the rest."""
        runs: list[dict[str, Any]] = self.flwr("list", NAME, "--run-id", str(run), seconds=30).get("runs", [])
        if not runs:
            raise FleetError(f"`flwr list` knows no run {run}")
        return runs[0]

    def flwr(self, *words: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """Flower's own command line, as the operator of this fleet."""
        command, called = [_program("flwr"), *words, "--format", "json"], f"`flwr {' '.join(words[:2])}`"
        try:
            done = subprocess.run(
                command,
                env=self._env("operator"),
                capture_output=True,
                text=True,
                timeout=seconds,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        except subprocess.TimeoutExpired:
            raise FleetError(f"{called} did not end within {seconds:g} s") from None
        found = re.search(r"\{.*\}", done.stdout, re.DOTALL)
        try:
            answer: dict[str, Any] = json.loads(found[0]) if found else {}
        except json.JSONDecodeError:
            answer = {"success": False}
        if done.returncode or not answer.get("success", True):
            why = answer.get("error-message") or done.stderr or done.stdout
            raise FleetError(f"{called} failed: {' '.join(str(why).split())[-400:]}")
        return answer

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def gone(self) -> Iterable[str]:
        """Parts that ended by themselves."""
        return [name for name, process in self.processes.items() if not process.alive]

    def stop(self) -> None:
        """Nodes first, so that each can sign off; a second signal does not interrupt this."""
        with undisturbed():
            nodes = [name for name in self.processes if name.startswith("node")]
            stop_all([self.processes.pop(name) for name in nodes])
            stop_all([self.processes.pop(name) for name in list(self.processes)])
            self._secret.unlink(missing_ok=True)

    @property
    def known_keys(self) -> Keys:
        assert self.keys is not None
        return self.keys

    @property
    def _secret(self) -> Path:
        """What a SuperExec proves itself with: without it the SuperLink hands a run's token to anyone who asks."""
        return self.folder / "keys" / "superexec.secret"

    def _secret_file(self) -> list[str]:
        return ["--superexec-auth-secret-file", str(self._secret)]

    def _server_files(self) -> list[str]:
        files = {
            "ca-certfile": self.known_keys.ca,
            "certfile": self.known_keys.certificate,
            "keyfile": self.known_keys.server_key,
        }
        return [word for name, path in files.items() for word in (f"--ssl-{name}", str(path))]

    def _spawn(self, name: str, command: list[str]) -> None:
        if name in self.processes:  # what a killed one left running
            stop_all([self.processes.pop(name)], 0)
        program = command[0] if Path(command[0]).is_absolute() else _program(command[0])
        self.processes[name] = Process(name, [program, *command[1:]], self._env(name), self._log(name))

    def _log(self, name: str) -> Path:
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        return log

    def last_words(self, name: str) -> str:
        """The end of what a part, or the server app, wrote."""
        return last_words(self._log(name))

    def _env(self, name: str) -> dict[str, str]:
        """Each part has its own Flower home: nodes unpack the app at the same time."""
        home = self.folder / "homes" / name
        home.mkdir(parents=True, exist_ok=True)
        ours = [self.folder / "warm", self.folder / "programs", Path(sys.executable).parent]
        path = os.pathsep.join([*map(str, ours), os.environ.get("PATH", "")])
        own = {"FLWR_HOME": str(home), "PATH": path}
        return {"OMP_NUM_THREADS": "1"} | os.environ | QUIET | dict(self.environment) | own

    def _write_connection(self) -> None:
        home = self.folder / "homes" / "operator"
        home.mkdir(parents=True, exist_ok=True)
        entry = {"address": self.address, "root-certificates": str(self.known_keys.ca)}
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in entry.items())
        (home / "config.toml").write_text(f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\n{lines}')

    def _until(self, ready: Callable[[], bool], name: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not ready():
            process = self.processes[name]
            if not process.alive or time.monotonic() > end:
                what = "did not answer in time" if process.alive else "ended at once"
                if not process.alive and listens(self.port):
                    what += f", and another program has taken port {self.port}: start again to get another port"
                raise FleetError(f"{name} {what}: {process.last_words()}")
            time.sleep(0.1)


def _program(name: str) -> str:
    """Flower's commands lie beside Python's own."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise FleetError(f"there is no {name} beside {sys.executable}: pip install 'fedge[flower]'")
    return str(path)
