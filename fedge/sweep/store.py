"""Results as JSON lines: one line per finished run, on disk before the next run begins."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from fedge.experiment import ExperimentError
from fedge.runs import atomic, regular
from fedge.runs.lines import parse

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

Line = dict[str, Any]
LONG = 100  # rounds
LOCKS = fcntl is not None  # whether several processes can share a store


def hold(file: IO[Any], wait: bool = True) -> None:
    """Keep other processes off a file until it is closed, or, if it is only read, those that write.

    BlockingIOError if one has it and we do not wait.
    """
    if fcntl is None:
        return
    if file.writable():
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    with suppress(OSError):  # a file system that has no locks
        fcntl.flock(file, fcntl.LOCK_SH)


def _mend(file: BinaryIO) -> None:
    """After a kill in the middle of the last line, cut it off; after one just before its end, end it."""
    file.seek(0)
    whole = file.read()
    if not whole or whole.endswith(b"\n"):
        return
    *_, last = whole.splitlines(keepends=True)
    if parse(last) is not None:
        file.write(b"\n")
    else:
        file.truncate(len(whole) - len(last))


def collapsed(line: Line) -> bool:
    """Whether a run's last accuracy is less than half of its best; in a short one, which swings, that means nothing.

    The last one, not the mean of the last rounds: that hides a fall in them.
    """
    seen = [value for value in line.get("test_accuracy", []) if value is not None]
    return line.get("rounds", 0) >= LONG and bool(seen) and seen[-1] < max(seen) / 2


class Store:
    """The lines of a file, found by key; of two with one key the later counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Line] = list(self._read())

    def _read(self) -> Iterator[Line]:
        if not self.path.exists():
            return
        with open(self.path, "rb", opener=regular.handle) as file:
            hold(file)  # another process may be in the middle of a line
            whole = file.read()
        if whole and not whole.endswith(b"\n"):
            with open(self.path, "rb+", opener=atomic.in_place) as file:
                hold(file)
                _mend(file)
                file.seek(0)
                whole = file.read()
        for number, raw in enumerate(whole.splitlines(), 1):
            if (line := parse(raw)) is None:
                raise ExperimentError(f"{self.path}, line {number}, is not a JSON object: repair or remove it")
            yield line

    def find(self, key: str) -> Line | None:
        return next((line for line in reversed(self.lines) if line.get("key") == key), None)

    def diverged(self, key: str) -> bool:
        """Whether a run failed or collapsed."""
        found = self.find(key)
        return found is not None and (bool(found.get("failed")) or collapsed(found))

    def add(self, line: Line) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab+", opener=atomic.in_place) as file:
                hold(file)
                _mend(file)
                file.write((json.dumps(line) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ExperimentError(f"cannot write {self.path}: {error.strerror}; choose another --out") from error
        self.lines.append(line)
