"""`fedge deploy keys` as a person types it: nothing is overwritten, and nobody else writes beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedge.cli.app import app


def keys(folder: Path, *more: str) -> tuple[int, str]:
    words = ["deploy", "keys", str(folder), *(more or ("--host", "192.0.2.7", "--nodes", "2"))]
    found = CliRunner().invoke(app, words)
    return found.exit_code, " ".join(found.stderr.split())


@pytest.mark.parametrize("name", ["ca.crt", "ca.key", "server.key", "node-1.key", "node-0.key.pub", "node-1.key.pub"])
@pytest.mark.parametrize("link", ["none", "to a file", "to nowhere"])
def test_keys_overwrite_nothing_and_follow_no_link(name: str, link: str, tmp_path: Path) -> None:
    folder, mine = tmp_path / "keys", tmp_path / "mine"
    folder.mkdir()
    if link == "none":
        (folder / name).write_text("precious")
    else:
        (folder / name).symlink_to(mine)
    if link == "to a file":
        mine.write_text("precious")
    code, said = keys(folder)
    assert (code, said) == (1, f"Error: {folder / name} exists: keys are never overwritten, choose another folder")
    assert [path.name for path in folder.iterdir()] == [name]
    assert mine.exists() == (link == "to a file")
    assert link == "to nowhere" or (folder / name).read_text() == "precious"


def test_a_folder_that_everybody_may_write_to_is_no_place_for_keys(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    code, said = keys(tmp_path)
    assert (code, f"run `chmod o-w {tmp_path}`" in said) == (1, True)
    tmp_path.chmod(0o755)
    assert keys(tmp_path) == (0, "")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.key")} == {0o600}


def test_keys_that_do_not_fit_on_the_disk_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, *words: Any) -> Any:
        file = fdopen(handle, *words)
        if len(list(tmp_path.iterdir())) == 5:
            os.close(handle)  # what is written then goes nowhere
        return file

    fdopen = os.fdopen
    monkeypatch.setattr("fedge.deploy.keys.os.fdopen", full)
    code, said = keys(tmp_path)
    assert (code, said) == (1, f"Error: cannot write to {tmp_path}: Bad file descriptor; choose another folder")
    assert not list(tmp_path.iterdir())


def test_nodes_and_hosts_that_cannot_be(tmp_path: Path) -> None:
    code, said = keys(tmp_path / "a", "--host", "192.0.2.7", "--nodes", "1000000000")
    assert (code, said) == (1, "Error: nodes is 1000000000, it must be at most 100,000")
    for host in ("999.1.1.1", "10.0.0"):
        code, said = keys(tmp_path / "a", "--host", host, "--nodes", "1")
        assert (code, f"host is '{host}', it must be an address such as" in said) == (1, True)
    assert not (tmp_path / "a").exists()
