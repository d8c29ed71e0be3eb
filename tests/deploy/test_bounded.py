"""`fedge deploy check` against a host whose answers have no end."""

from __future__ import annotations

import contextlib
import gzip
import re
import socketserver
import threading
import time
import tracemalloc
from collections.abc import Iterator

import pytest

from fedge.deploy import bounded
from fedge.deploy.check import check
from fedge.deploy.tls import CheckFailed

HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
BOMB = gzip.compress(bytes(1 << 24))
ANSWERS = {  # the first piece, the piece that is sent again and again, and what is said of it
    "a slow head": (HEAD, b"X: y\r\n", "no whole answer within 0.5 s"),
    "a slow body": (HEAD + b"Content-Length: 9999\r\n\r\n", b"x", "no whole answer within 0.5 s"),
    "a body without end": (HEAD + b"\r\n", bytes(1 << 16), "the answer has more than 4 MiB"),
    "a bomb": (HEAD + b"Content-Encoding: gzip\r\n\r\n" + BOMB, b"", "Invalid protobuf response payload"),
    "another address": (HEAD.replace(b"200 OK", b"307 X") + b"Location: http://127.0.0.1:9/\r\n\r\n", b"", "HTTP 307"),
}


@contextlib.contextmanager
def host(first: bytes, piece: bytes) -> Iterator[str]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            asked = self.request.recv(1 << 16)
            with contextlib.suppress(OSError):
                self.request.sendall(first if asked.startswith(b"POST") else HEAD + b"\r\n")
                while piece and asked.startswith(b"POST"):
                    self.request.sendall(piece)
                    time.sleep(0.05 if len(piece) < 100 else 0)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_has_an_end_and_a_size(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, piece, said = ANSWERS[kind]
    monkeypatch.setattr(bounded, "SECONDS", 0.5 if piece and len(piece) < 100 else 20)
    with host(first, piece) as address:
        begin = time.monotonic()
        tracemalloc.start()
        try:
            with pytest.raises(CheckFailed, match=f"not as a SuperLink does .*{re.escape(said)}"):
                list(check(address, None, None))
            assert tracemalloc.get_traced_memory()[1] < 14 << 20
        finally:
            tracemalloc.stop()
        assert time.monotonic() - begin < 5
