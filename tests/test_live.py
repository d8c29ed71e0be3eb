"""The served report: to this machine alone, up to date while a run goes on, looked at in a real browser."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedge.cli.app import app
from fedge.report import ReportError
from fedge.report.live import LivePage, check_host, server
from fedge.runs.experiments import run_folders

from .test_report import EVIL, noisy_record, write_run

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def serving(page: LivePage) -> Iterator[int]:
    made = server(page)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield made.server_address[1]
    finally:
        made.shutdown()
        made.server_close()
        thread.join()


def ask(port: int, path: str, host: str = "127.0.0.1", method: str = "GET") -> tuple[int, str, dict[str, str]]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers={"Host": f"{host}:{port}", "Connection": "close"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, dict(answer.getheaders())


def go_on(folder: Path, number: int) -> None:
    """One more round on record."""
    import random

    with open(folder / "rounds.jsonl", "a") as file:
        file.write(json.dumps(noisy_record(number, 0.1, 0.0, False, random.Random(number))) + "\n")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "runs" / "one", EVIL, rounds=5)
    (folder / "summary.json").unlink()
    (folder / "config.toml").write_text(f"{(folder / 'config.toml').read_text()}\n")
    return tmp_path / "runs"


def page_of(runs: Path) -> LivePage:
    """Drawn in no time, by its clock: it never rests."""
    return LivePage(lambda: run_folders(runs), clock=lambda: 0.0)


def test_the_page_is_drawn_anew_when_a_round_was_added(runs: Path) -> None:
    with serving(page_of(runs)) as port:
        status, first, headers = ask(port, "/")
        assert status == 200
        assert "5 of 5, unfinished" in first
        assert headers["Content-Security-Policy"].startswith("default-src 'none';")
        assert "script-src 'self'" in headers["Content-Security-Policy"]
        before = ask(port, "/state")[1]
        assert ask(port, "/state")[1] == before
        assert ask(port, "/")[1] == first
        go_on(runs / "one", 6)
        assert ask(port, "/state")[1] != before
        assert "6 of 5, unfinished" in ask(port, "/")[1]


def test_drawing_takes_a_quarter_of_the_time_at_most(runs: Path) -> None:
    times = iter([0.0, 0.0, 10.0, 10.0, 39.0, 41.0, 41.0])  # asked, begun, done (twice), asked, asked
    page = LivePage(lambda: run_folders(runs), clock=lambda: next(times))
    page.html()
    drawn = page._drawn[0]
    go_on(runs / "one", 6)
    assert page.state() == drawn
    assert page.state() != drawn


def test_runs_may_begin_while_it_is_served(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with serving(page_of(tmp_path / "runs")) as port:
        assert "No run has a round yet." in ask(port, "/")[1]
        write_run(tmp_path / "runs" / "one")
        assert "1 run: FedAvg" in ask(port, "/")[1]


def test_nothing_but_the_report_is_served(runs: Path) -> None:
    with serving(page_of(runs)) as port:
        for path in ("/runs/one/rounds.jsonl", "/../../etc/passwd", "/live.py", "/report.html"):
            assert ask(port, path)[0] == 404
        assert ask(port, "/live.js")[2]["Content-Type"].startswith("text/javascript")
        assert ask(port, "/", method="POST")[0] == 501


def test_a_browser_that_goes_away_is_not_worth_a_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = page_of(runs)
    with serving(page) as port:
        with socket.create_connection(("127.0.0.1", port)) as gone:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert ask(port, "/")[0] == 200
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("lie", [{"algorithm": "a\ud800b"}, {"diverged": "a\ud800b"}, {"versions": {"a\ud800b": "1"}}])
def test_what_is_no_text_in_a_file_is_answered(lie: dict, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "one" / "summary.json").write_text(json.dumps(lie))
    with serving(page_of(runs)) as port:
        code, text, _ = ask(port, "/")
    assert (code, "a?b" in text) == (200, True) or (code, "cannot show" in text) == (503, True)
    assert capsys.readouterr().err == ""


def test_a_page_of_another_site_cannot_read_it(runs: Path) -> None:
    with serving(page_of(runs)) as port:
        assert ask(port, "/", host="evil.example")[0] == 403
        assert ask(port, "/state", host="evil.example")[0] == 403
        assert ask(port, "/state", host="localhost")[0] == 200


def test_what_comes_from_the_files_is_escaped_here_too(runs: Path) -> None:
    text = page_of(runs).html()
    assert text.count("<script") == 1
    assert '<script src="/live.js"></script>' in text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org"])
def test_other_machines_are_refused_unless_told(host: str) -> None:
    with pytest.raises(ReportError, match="other machines could read the report; leave it out for"):
        check_host(host, anyone=False)
    check_host(host, anyone=True)


def test_the_command_refuses_them_too(runs: Path) -> None:
    found = CliRunner().invoke(app, ["report", str(runs), "--live", "--host", "0.0.0.0"])
    assert found.exit_code == 2
    assert "add --anyone" in found.output
    found = CliRunner().invoke(app, ["report", str(runs / "none"), "--live"])
    assert found.exit_code == 2
    assert "is not a folder" in found.output


def test_a_port_that_is_taken_is_named(runs: Path) -> None:
    with serving(page_of(runs)) as port, pytest.raises(ReportError, match=f"cannot listen on 127.0.0.1:{port}"):
        server(page_of(runs), port=port)


class GoesOn(LivePage):
    """A run that has one more round whenever its state was asked for twice."""

    def __init__(self, runs: Path) -> None:
        super().__init__(lambda: run_folders(runs), clock=lambda: 0.0)
        self.runs, self.asked = runs, 0

    def state(self) -> str:
        if threading.current_thread() is not threading.main_thread() and not self._lock.locked():
            self.asked += 1
            if self.asked == 2:
                go_on(self.runs / "one", 6)
        return super().state()


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
def test_a_browser_shows_the_new_round(runs: Path, tmp_path: Path) -> None:
    with serving(GoesOn(runs)) as port:
        done = subprocess.run(
            [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
             "--virtual-time-budget=15000", "--dump-dom", f"http://127.0.0.1:{port}/"],
            capture_output=True, text=True, timeout=180, check=True,
        )  # fmt: skip
    assert "6 of 5, unfinished" in done.stdout
    assert "5 of 5, unfinished" not in done.stdout
    assert '<p id="live" role="status">live</p>' in done.stdout
    assert "alert(" not in done.stdout.replace("&lt;script&gt;alert(", "")
