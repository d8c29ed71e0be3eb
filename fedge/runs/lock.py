"""One process at a time writes into a folder.

The lock is flock on the file `.lock`, which the kernel gives back however a process ends; the file says who holds it.
Network file systems that carry flock between machines (NFS 4, CephFS, SMB) carry this too. Where a file system has no
flock, the file alone decides: whoever made it holds the folder until it removes it, or until its process is found dead
on the machine that made it.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedge.runs import atomic

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
_NO_FLOCK = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}


class Held(ValueError):
    """Another process holds the folder; says which, and what to do."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder; `Held` if another process, or another run of this one, does."""
    path = folder / NAME
    handle = _acquire(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while it is still held: nobody else can have it
        os.close(handle)


def _acquire(path: Path) -> int:
    while True:
        handle = atomic.in_place(str(path), os.O_RDWR | os.O_CREAT)
        try:
            taken = _flock(handle, path)
            if taken and _is_at(handle, path):
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(_self()).encode(), 0)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its holder removed it between open and flock: there may be a new one


def _flock(handle: int, path: Path) -> bool:
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            raise Held(_refusal(path, _read(handle))) from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
    return _by_content(handle, path)


def _by_content(handle: int, path: Path) -> bool:
    """Without flock: an empty file is free, and so is that of a process that this machine does not have any more."""
    holder = _read(handle)
    if holder and not _is_dead(holder):
        raise Held(_refusal(path, holder))
    return True


def _is_at(handle: int, path: Path) -> bool:
    """Whether the open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _self() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": _started(os.getpid())}


def _read(handle: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(handle, 4096, 0))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _refusal(path: Path, holder: dict[str, Any]) -> str:
    who = f"process {str(holder.get('pid', '?'))[:20]} on {str(holder.get('host', '?'))[:100]!r}"
    return f"{path.parent} is in use by {who}: wait for it or end it; if there is none, remove {path}"


def _is_dead(holder: dict[str, Any]) -> bool:
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or type(pid) is not int or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return holder.get("started") is not None and holder["started"] != _started(pid)


def _started(pid: int) -> int | None:
    """When a process began, in ticks since the machine did; a number that is used again begins later. Linux alone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
