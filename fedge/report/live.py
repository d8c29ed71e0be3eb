"""A report that follows its runs: served to this machine's browser, drawn anew when a folder has changed.

Three addresses are answered and nothing else: the page, its state (a short text that changes with the runs) and the
script that asks for the state and takes the new page.
"""

from __future__ import annotations

import ipaddress
import math
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedge.report.errors import ReportError
from fedge.report.page import CLOSED, LIVE_POLICY
from fedge.report.read import read_all
from fedge.report.write import compose
from fedge.runs.experiments import FAILURE_FILE

SCRIPT = Path(__file__).with_name("live.js")
ELEMENT = '<p id="live" role="status">live</p>\n<script src="/live.js"></script>'
WATCHED = ("rounds.jsonl", "summary.json", FAILURE_FILE)
REST = 3  # times as long as a drawing took, before the next
NAMES = ("localhost", "127.0.0.1", "::1")

Folders = Callable[[], Sequence[Path]]  # the run folders that are there now


class LivePage:
    """The page of some folders, drawn again only when something in them has changed."""

    def __init__(
        self, folders: Folders, target: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folders, self._target, self._clock = folders, target, clock
        self._lock = threading.Lock()
        self._drawn: tuple[str, str] = ("", "")
        self._rests_until = -math.inf

    def state(self) -> str:
        """Changes with every round, end or failure of a run, and with every new run.

        Not at once: drawing takes at most a quarter of the time, for the runs need the processor too.
        """
        return self._drawn[0] if self._clock() < self._rests_until else _checksum(self._begun())

    def _begun(self) -> list[Path]:
        """Runs that have a round."""
        return [path for path in self._folders() if _size(path / "rounds.jsonl")]

    def html(self) -> str:
        with self._lock:  # one drawing at a time
            state = self.state()
            if self._drawn[0] != state:
                begin, begun = self._clock(), self._begun()
                text, _ = compose(read_all(begun) if begun else [], self._target, ELEMENT)
                self._drawn = state, text
                self._rests_until = self._clock() + REST * (self._clock() - begin)
            return self._drawn[1]


def _checksum(folders: Sequence[Path]) -> str:
    seen = [f"{path} {name} {_size(path / name)}" for path in folders for name in WATCHED]
    return f"{zlib.crc32(chr(10).join(seen).encode(errors='replace')):08x}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def check_host(host: str, anyone: bool) -> None:
    """Only this machine may read the report, unless that is said."""
    try:
        here = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        here = False
    if not here and not anyone:
        raise ReportError(
            f"host is {host!r}: other machines could read the report; leave it out for 127.0.0.1, or add --anyone"
        )


def server(page: LivePage, host: str = "127.0.0.1", port: int = 0, anyone: bool = False) -> ThreadingHTTPServer:
    """A server that is bound but not yet at work: call `serve_forever`. Port 0 is any that is free."""
    check_host(host, anyone)

    class Handler(_Handler):
        shown, open_to_all = page, anyone

    try:
        made = _Server((host, port), Handler)
    except OSError as error:
        raise ReportError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
        ) from error
    made.daemon_threads = True
    return made


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is not worth a line."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    shown: LivePage
    open_to_all: bool
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds that a silent connection is kept

    def do_GET(self) -> None:
        """The page, its state, its script; to a page of another site that calls itself by another name, nothing."""
        if not self._is_for_us():
            return self._answer(403, "text/plain", "this report is for the machine that it runs on")
        path = self.path.partition("?")[0]
        try:
            if path == "/":
                return self._answer(200, "text/html", self.shown.html())
            if path == "/state":
                return self._answer(200, "text/plain", self.shown.state())
            if path == "/live.js":
                return self._answer(200, "text/javascript", SCRIPT.read_text("utf-8"))
        except ReportError as error:  # a file that is being written, or is damaged
            return self._answer(503, "text/plain", str(error))
        return self._answer(404, "text/plain", "there is nothing here but the report at /")

    def _is_for_us(self) -> bool:
        """Whether the browser was told to go to this machine by a name of its own, and not by one made up elsewhere."""
        name = self.headers.get("Host", "").rsplit(":", 1)[0].strip("[]")
        return self.open_to_all or name in NAMES

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode(errors="replace")  # a file may hold what is no text
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", LIVE_POLICY if kind == "text/html" else CLOSED)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not worth a line."""
