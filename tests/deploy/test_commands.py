"""`fedge deploy keys` and `check` on what is no host, no time and no SuperLink: one line each."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedge.cli.app import app


def fedge(*words: str | Path) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["deploy", *map(str, words)])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "fleet.ex\u00e4mple.org"], "it must be as certificates spell it: --host fleet.xn--exmple-cua.org"),
        (["--host", "\ud800.org"], "it must be an address such as"),
        (["--host", "a" * 64 + ".org"], "it must be an address such as"),
        (["--host", "-a.org"], "it must be an address such as"),
        (["--host", "a", "--days", "99999999"], "days is 99999999, it must be at most 36500"),
    ],
    ids=["umlaut", "surrogate", "long", "hyphen", "days"],
)
def test_keys_that_cannot_be_made(tmp_path: Path, words: list[str], message: str) -> None:
    code, errors = fedge("keys", tmp_path / "keys", "--nodes", "1", *words)
    assert code == 1
    assert errors.startswith("Error: ")
    assert message in errors
    assert len(errors.splitlines()) == 1
    assert not (tmp_path / "keys").exists()


@contextlib.contextmanager
def web_server(code: int) -> Iterator[str]:
    class Page(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(code)
            self.send_header("content-length", "15")
            self.end_headers()
            self.wfile.write(b"<html>Hi</html>")

        do_GET = do_POST

        def log_message(self, *_: object) -> None: ...

    class Quiet(http.server.ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client that has seen enough closes its connection."""

    server = Quiet(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("code", [200, 404, 405, 501])
def test_a_plain_web_server_is_no_superlink(code: int) -> None:
    with web_server(code) as address:
        failed, errors = fedge("check", address, "--insecure")
    assert failed == 1
    assert f"{address} answers, but not as a SuperLink does" in errors
    assert len(errors.splitlines()) == 1


OWN_PARTS = Path(__file__).parents[2] / "examples" / "own_parts" / "pumps.toml"


def test_nodes_of_data_that_bring_their_clients(tmp_path: Path) -> None:
    code, errors = fedge("local", OWN_PARTS, "--nodes", "2", "--out", tmp_path / "out")
    assert code == 2
    assert errors.startswith("Error: --nodes is 2, the data come with 40 clients and a fleet has one node per client: ")
    assert "leave out --nodes to start 40, or let [data] give 2 clients" in errors
    assert len(errors.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_nodes_are_the_clients_of_a_file_with_a_partition() -> None:
    from fedge.deploy.local import plan_local

    assert plan_local(None, [], None, False, 3).experiment.partition["clients"] == 3
    assert plan_local(OWN_PARTS, [], None, False, 40).experiment.partition == {}
    settings = ["partition.kind=iid"]
    assert plan_local(OWN_PARTS, settings, None, False, 3).experiment.partition["clients"] == 3
