"""Only files are read or written in a folder of runs: a pipe or a device that somebody else left there has no end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def handle(path: str, flags: int) -> int:
    """The `opener` of what must be a file; `OSError` for a pipe, a socket or a device, without waiting for it."""
    found = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    mode = os.fstat(found).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # Python says by itself what is wrong with a folder
        return found
    os.close(found)
    raise OSError(errno.EINVAL, "it is no file but a pipe or a device: remove it", path)


def content(path: Path) -> bytes:
    """All of a file."""
    with open(path, "rb", opener=handle) as file:
        return file.read()
