"""The folder of a fleet that lives for one command, keys included: it goes when its owner ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fedge.deploy.process import undisturbed

PREFIX, OWNER = "fedge-fleet-", "owner"


@contextlib.contextmanager
def fleet_folder() -> Iterator[Path]:
    """A folder that is removed at the end; folders left by killed predecessors are removed first."""
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with open(folder / f"{OWNER}.new", "wb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        (folder / f"{OWNER}.new").rename(folder / OWNER)  # whoever finds it finds it locked
        try:
            yield folder
        finally:
            with undisturbed():
                shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove this user's folders whose owner is dead: the system gives up a lock with its process, however it ends."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if _mine(folder) and _dead(folder / OWNER):
                shutil.rmtree(folder, ignore_errors=True)


def _mine(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _dead(owner: Path) -> bool:
    with open(owner, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
