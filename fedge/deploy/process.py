"""Processes that are ended with everything they started, whatever happens to the one that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Process:
    """A program in a session of its own, so that Ctrl-C is ours to handle; its output goes to a file."""

    def __init__(self, name: str, command: Sequence[str | Path], env: Mapping[str, str], log: Path) -> None:
        self.name, self.log = name, log
        with open(log, "ab") as output:
            self._popen = subprocess.Popen(
                [str(word) for word in command],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                umask=0o077,  # databases and logs are nobody else's affair
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Looks without reaping: while the process id is taken, `signal` cannot hit another process."""
        if self._popen.returncode is not None:
            return False
        if not hasattr(os, "waitid"):
            return self._popen.poll() is None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def signal(self, number: int) -> None:
        """To the whole session: a SuperNode's apps must not outlive it."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def wait(self, seconds: float) -> bool:
        """Whether it ended in time."""
        end = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)
        return True

    def reap(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(seconds)

    def last_words(self) -> str:
        """The end of its output, in one line."""
        return last_words(self.log)


def last_words(log: Path) -> str:
    """The end of a log, in one line."""
    text = log.read_text("utf-8", errors="replace") if log.exists() else ""
    return " ".join(text.split())[-400:]


def stop_all(processes: Sequence[Process], patience: float = 8.0) -> None:
    """Ask all to end, wait, and kill what is left: also the children of one that is gone already."""
    for process in processes:
        process.signal(signal.SIGTERM)
    end = time.monotonic() + patience
    for process in processes:
        process.wait(max(0.0, end - time.monotonic()))
    for process in processes:
        process.signal(signal.SIGKILL)
    for process in processes:
        process.reap(patience)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore signals while stopping: what an interruption left running would stay.

    Outside the main thread signals are not ours to handle.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: handler for number in ENDING if (handler := signal.getsignal(number)) is not None}
    try:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die_with_parent() -> None:
    """Linux ends this process when its parent is gone, even by kill -9."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """A free port of the loop-back address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def listens(port: int, host: str = "127.0.0.1") -> bool:
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False
