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


def content(path: Path, most: int | None = None) -> bytes:
    """All of a file; `OSError` for one of more than `most` bytes, which may be holes that take no room on the disk."""
    with open(path, "rb", opener=handle) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, and {most} are read at most: remove it", str(path))
        return file.read()
