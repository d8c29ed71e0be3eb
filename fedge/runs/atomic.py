"""All of a file or nothing of it, even when the power goes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """All of it or nothing, even when the power goes: a temporary file is synced, then renamed."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
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


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
