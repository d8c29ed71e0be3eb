"""All of a file or nothing of it, even when the power goes; and nothing through a link that somebody else left."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fedge import regular


def write_atomically(path: Path, content: bytes) -> None:
    """All of it or nothing, even when the power goes."""
    with replaced(path) as file:
        file.write(content)


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of another once it is whole: a temporary one is synced, then renamed."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:  # never what somebody else put there: it may be a link to another file
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # as on a full disk
            error.filename = str(path)
        raise
    _sync_folder(path.parent)


def also_as(path: Path, name: Path) -> None:
    """The same file under a second name, whatever had it; a copy where the file system has no links."""
    temporary = name.with_name(f".{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        shutil.copyfile(path, temporary)
    os.replace(temporary, name)
    temporary.unlink(missing_ok=True)  # two names of one file: replacing leaves both


def refuse_link(path: Path) -> None:
    """A folder from somebody else may hold links to files and folders of yours; `OSError` for one of these."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, and nothing is written through one: remove it", str(path))


def in_place(path: str, flags: int) -> int:
    """The `opener` of files that are changed where they lie."""
    refuse_link(Path(path))
    return regular.handle(path, flags | getattr(os, "O_NOFOLLOW", 0))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
