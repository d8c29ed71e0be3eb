"""`fedge deploy` without the extra `flower`: everything else works, and one line says what to install."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedge.cli.app import app


@pytest.fixture
def without_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("fedge.deploy")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)


@pytest.mark.parametrize(
    "words",
    [
        ["local"],
        ["keys", "there", "--host", "192.0.2.7", "--nodes", "2"],
        ["check", "127.0.0.1:9", "--root-certificates", "ca.crt"],
    ],
    ids=lambda words: words[0],
)
def test_a_missing_extra_is_named(
    words: list[str], without_flower: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["deploy", *words])
    assert found.exit_code == 1
    assert found.stderr == "Error: fedge deploy needs flwr: pip install 'fedge[flower]'\n"
    assert not list(tmp_path.iterdir())


def test_help_needs_no_extra(without_flower: None) -> None:
    for words in ([], ["local"], ["keys"], ["check"]):
        assert CliRunner().invoke(app, ["deploy", *words, "--help"]).exit_code == 0
