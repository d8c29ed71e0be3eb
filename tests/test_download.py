"""Downloads from a server on this machine: whole, cut short, wrong, interrupted."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedge.data import DataError
from fedge.data.download import download
from fedge.data.files import Remote

CONTENT = bytes(range(256)) * 400
CHECKSUM = f"md5:{hashlib.md5(CONTENT).hexdigest()}"


class Handler(BaseHTTPRequestHandler):
    """/whole sends all, /cut closes half-way, /other sends something else."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        body = CONTENT if not self.path.startswith("/other") else CONTENT[::-1]
        if self.path.startswith("/none"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if self.path.startswith("/cut") else body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def address() -> Iterator[str]:
    Handler.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


class Count:
    """What pooch wants of a progress bar."""

    total = 0

    def __init__(self) -> None:
        self.seen = 0

    def update(self, size: int) -> None:
        self.seen += size

    def reset(self) -> None:
        self.seen = 0

    def close(self) -> None: ...


def test_a_file_is_fetched_once(address: str, tmp_path: Path) -> None:
    remote, bar = Remote(f"{address}/whole.bin", CHECKSUM), Count()
    (path,) = download([remote], tmp_path, bar)
    assert path.read_bytes() == CONTENT
    assert bar.total == bar.seen == len(CONTENT)
    assert download([remote], tmp_path) == [path]
    assert Handler.asked == ["/whole.bin"]
    assert [one.name for one in tmp_path.iterdir()] == ["whole.bin"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("cut.bin", "cannot download"), ("other.bin", "did not send the official file"), ("none.bin", "404")],
)
def test_nothing_is_kept_of_a_bad_download(address: str, tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        download([Remote(f"{address}/{name}", CHECKSUM)], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_download_starts_over(address: str, tmp_path: Path) -> None:
    """What a kill leaves is swept away, and a file that is there but wrong is replaced."""
    (tmp_path / ".download").mkdir()
    (tmp_path / ".download" / "tmpabc").write_bytes(CONTENT[:1000])
    (tmp_path / "whole.bin").write_bytes(CONTENT[:1000])
    (path,) = download([Remote(f"{address}/whole.bin", CHECKSUM)], tmp_path)
    assert path.read_bytes() == CONTENT
    assert [one.name for one in tmp_path.iterdir()] == ["whole.bin"]


def test_without_pooch_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(DataError, match=r"need pooch: pip install 'fedge\[download\]'"):
        download([Remote("http://127.0.0.1:1/x", CHECKSUM)], tmp_path)


def test_no_server_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot download http://127\.0\.0\.1:1/x") as caught:
        download([Remote("http://127.0.0.1:1/x", CHECKSUM)], tmp_path)
    assert "\n" not in str(caught.value)
