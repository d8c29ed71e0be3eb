"""`fedge data` as a person types it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedge.cli.app import app
from fedge.data import DataError, fashion_mnist, load
from fedge.data.files import Remote, check_file, read

from . import official
from .test_download import address  # noqa: F401  a server on this machine


def invoke(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["data", *words])
    return found.exit_code, " ".join(found.output.split())


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small local copy that counts as the official one, and an empty folder for fedge's own."""
    checksums = official.fashion(tmp_path / "copy")
    monkeypatch.setattr(fashion_mnist, "CONTENT", checksums)
    monkeypatch.setattr(fashion_mnist, "DEBIAN", str(tmp_path / "nowhere"))
    monkeypatch.setenv("FEDGE_DATA", str(tmp_path / "data"))
    return tmp_path / "copy"


def test_a_local_copy_is_checked_kept_and_found_again(copy: Path) -> None:
    assert "not here: fedge data get fashion_mnist" in invoke("list")[1]
    code, text = invoke("get", "fashion_mnist", "--from", str(copy))
    assert code == 0, text
    kept = copy.parent / "data" / "fashion_mnist"
    assert sorted(path.name for path in kept.iterdir()) == sorted(path.name for path in copy.iterdir())
    code, text = invoke("check", "fashion_mnist")
    assert (code, "complete and as expected" in text) == (0, True)
    code, text = invoke("check")
    assert code == 0
    assert text.count("complete and as expected") == 2  # and the digits


def test_a_damaged_copy_is_refused_and_nothing_is_kept(copy: Path) -> None:
    path = copy / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-3])
    code, text = invoke("get", "fashion_mnist", "--from", str(copy))
    assert code == 2
    assert "truncated or damaged" in text
    assert not (copy.parent / "data").exists()


def test_nothing_is_written_through_a_link_in_the_folder(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write there may have put links to files of the user where a copy is made."""
    mine, kept = copy.parent / "mine.txt", copy.parent / "data" / "fashion_mnist"
    mine.write_text("precious")
    kept.mkdir(parents=True)
    for path in copy.iterdir():
        for name in (path.name, f".{path.name}.part", f".{path.name}.tmp"):
            (kept / name).symlink_to(mine)
    code, text = invoke("get", "fashion_mnist", "--from", str(copy))
    assert code == 0, text
    assert mine.read_text() == "precious"
    assert all((kept / path.name).read_bytes() == path.read_bytes() for path in copy.iterdir())


@pytest.mark.parametrize("other", ["pipe", "device"])
def test_what_is_no_file_is_not_waited_for(other: str, copy: Path) -> None:
    for path in copy.iterdir():
        path.unlink()
        os.mkfifo(path) if other == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(DataError, match="it is no file but a pipe or a device"):
        read(next(copy.iterdir()))
    with pytest.raises(DataError, match="it is no file but a pipe or a device"):
        check_file(next(copy.iterdir()), "md5:0")
    code, text = invoke("check", "fashion_mnist", "--from", str(copy))
    assert (code, "Traceback" in text) == (1, False)


def test_memory_that_is_too_small_is_one_line(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> bytes:
        raise MemoryError

    monkeypatch.setattr(fashion_mnist, "read", full)
    code, text = invoke("check", "fashion_mnist", "--from", str(copy))
    assert (code, text) == (1, "Error: fashion_mnist: there is not enough memory")


def test_a_user_without_a_home_folder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "FEDGE_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    told = "this user has no home folder: set FEDGE_DATA to a folder for data sets"
    assert (invoke("list")[0], told in invoke("list")[1]) == (0, True)
    assert invoke("check") == (2, f"Error: {told}")
    assert invoke("check", "cifar10") == (1, f"Error: cifar10: {told}")
    assert invoke("get", "cifar10", "--from", "here") == (2, f"Error: {told}")
    monkeypatch.setenv("FEDGE_DATA", "~nosuchuser/x")
    told = "FEDGE_DATA is ~nosuchuser/x, but there is no such home folder: name the folder in full"
    assert (invoke("list")[0], told in invoke("list")[1]) == (0, True)
    assert invoke("check", "cifar10") == (1, f"Error: cifar10: {told}")
    with pytest.raises(DataError, match="path is ~nosuch/x, but there is no such home folder"):
        load("cifar10", "~nosuch/x")


def test_a_folder_that_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setenv("FEDGE_DATA", str(tmp_path))
    monkeypatch.setattr(Path, "is_file", refused)
    assert (invoke("list")[0], "not here: fedge data get speech_commands" in invoke("list")[1]) == (0, True)
    with pytest.raises(DataError, match=f"cannot look for data at {tmp_path}.*: Permission denied; name another"):
        load("speech_commands", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    told = f"FEDGE_DATA is {tmp_path}, which you may not read: name another folder with your copies, or unset it"
    assert (invoke("list")[0], told in invoke("list")[1]) == (0, True)
    assert invoke("check") == (2, f"Error: {told}")


def test_check_fails_on_what_was_damaged_later(copy: Path) -> None:
    invoke("get", "fashion_mnist", "--from", str(copy))
    path = copy.parent / "data" / "fashion_mnist" / "train-labels-idx1-ubyte.gz"
    path.write_bytes(b"")
    code, text = invoke("check")
    assert code == 1
    assert "train-labels-idx1-ubyte.gz is truncated or damaged" in text or "idx header" in text


def test_a_download_is_kept_and_loaded(copy: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """From a server that sends something else, nothing is kept."""
    wrong = (Remote(f"{address}/other.bin", "md5:0"),)
    monkeypatch.setitem(_entry().__dict__, "remotes", wrong)
    code, text = invoke("get", "fashion_mnist")
    assert code == 2
    assert "did not send the official file" in text
    assert list((copy.parent / "data" / "fashion_mnist").iterdir()) == []


def _entry():
    from fedge.data.catalogue import LOADERS

    return LOADERS["fashion_mnist"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("get", "fashon_mnist"), "did you mean 'fashion_mnist'?"),
        (("get", "digits"), "part of the library"),
        (("check", "cifar10", "digits", "--from", "x"), "--from is for one data set"),
        (("check", "cifar10", "--from", "/no/such/place"), "there is no /no/such/place"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], message: str) -> None:
    code, text = invoke(*words)
    assert code in (1, 2)
    assert message in text
