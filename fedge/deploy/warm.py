"""Apps that start warm: torch, Flower and fedge are loaded once, and every message gets a copy of that process.

Flower's SuperExec runs the program `flwr-clientapp`, as it finds it on the PATH, for every message; loading torch and
Flower anew takes most of a short phase. Here that program is a few lines that ask a process which has everything
loaded to fork. The child is Flower's own `flwr-clientapp`, with its arguments and environment: each message still has
a process of its own, and if the warm process does not answer the real program is started.

    python -m fedge.deploy.warm FOLDER &                 # keeps FOLDER/flwr-clientapp alive
    PATH=FOLDER:$PATH flower-supernode ...
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from fedge.loop import warm_up

PROGRAM, SOCKET = "flwr-clientapp", "warm.sock"
LOADED = ("flwr.supernode.cli", "flwr.supernode.runtime.run_clientapp", "fedge.deploy", "fedge.experiment")
LONGEST = 1 << 20  # bytes of arguments and environment

SHIM = """#!{python} -SE
import json, os, socket, sys
try:
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(10)
    line.connect({socket!r})
    line.sendall(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode())
    line.shutdown(socket.SHUT_WR)
    if line.recv(2) == b"ok":
        sys.exit(0)
except OSError:
    pass
os.execv({real!r}, [{real!r}, *sys.argv[1:]])
"""


def install(folder: Path) -> Path:
    """Write the program that stands in for Flower's, and return the folder to put on the PATH."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    shim, real = folder / PROGRAM, Path(sys.executable).parent / PROGRAM
    shim.write_text(SHIM.format(python=sys.executable, socket=str(folder / SOCKET), real=str(real)))
    shim.chmod(0o700)
    return folder


def serve(folder: Path) -> NoReturn:
    """Load everything, then fork for each request until this process is ended."""
    for name in LOADED:
        importlib.import_module(name)
    warm_up()
    path = install(folder) / SOCKET
    path.unlink(missing_ok=True)
    signal.signal(signal.SIGCHLD, _reap)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        path.chmod(0o600)
        door.listen(64)
        while True:
            line, _ = door.accept()
            with line, contextlib.suppress(OSError, ValueError):
                arguments, environment, place = _request(line)
                if os.fork() == 0:
                    door.close()
                    line.close()
                    _become(arguments, environment, place)
                line.sendall(b"ok")


def _request(line: socket.socket) -> tuple[list[str], dict[str, str], str]:
    line.settimeout(10)
    text = b""
    while piece := line.recv(65536):
        text += piece
        if len(text) > LONGEST:
            raise ValueError("a request is too long")
    arguments, environment, place = json.loads(text)
    return arguments, environment, place


def _become(arguments: list[str], environment: dict[str, str], place: str) -> NoReturn:
    """This copy is now the app, and ends as the app does."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(place)
        sys.argv = [PROGRAM, *arguments]
        importlib.import_module("flwr.supernode.cli").flwr_clientapp()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _reap(number: int, frame: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m fedge.deploy.warm FOLDER")
    serve(Path(sys.argv[1]).resolve())
