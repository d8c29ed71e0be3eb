"""Results as JSON lines: one line a finished run, on disk before the next run begins."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fedge.experiment import ExperimentError

Line = dict[str, Any]
LONG = 100  # rounds


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except ValueError:
        return False
    return True


def hold(file: IO[Any], wait: bool = True) -> None:
    """Keep other processes off a file until it is closed, or, if it is only read, those that write.

    BlockingIOError if one has it and we do not wait.
    """
    try:
        import fcntl
    except ImportError:  # Windows has none
        return
    kind = fcntl.LOCK_EX if file.writable() else fcntl.LOCK_SH
    fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)


def collapsed(line: Line) -> bool:
    """Whether a run ended at less than half of its best accuracy; in a short one, which swings, that means nothing."""
    final, best = line.get("final_accuracy"), line.get("best_accuracy")
    return line.get("rounds", 0) >= LONG and final is not None and best is not None and final < best / 2


class Store:
    """The lines of a file, found by key; of two with one key the later counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Line] = list(self._read())

    def _read(self) -> Iterator[Line]:
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            hold(file)  # another process may be in the middle of a line
            whole = file.read()
            if whole and not whole.endswith(b"\n"):
                whole = self._mended(whole)
        for number, raw in enumerate(whole.splitlines(), 1):
            try:
                yield json.loads(raw)
            except ValueError:
                raise ExperimentError(f"{self.path}, line {number}, is not JSON: repair or remove it") from None

    def _mended(self, whole: bytes) -> bytes:
        """After a kill in the middle of the last line, without it; after one just before its end, with the end."""
        *_, last = whole.splitlines(keepends=True)
        if not _is_json(last):
            os.truncate(self.path, len(whole) - len(last))
            return whole[: -len(last)]
        with open(self.path, "ab") as file:
            file.write(b"\n")
        return whole + b"\n"

    def find(self, key: str) -> Line | None:
        return next((line for line in reversed(self.lines) if line.get("key") == key), None)

    def diverged(self, key: str) -> bool:
        """Whether a run failed or collapsed."""
        found = self.find(key)
        return found is not None and (bool(found.get("failed")) or collapsed(found))

    def add(self, line: Line) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab") as file:
                hold(file)
                file.write((json.dumps(line) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ExperimentError(f"cannot write {self.path}: {error.strerror}; choose another --out") from error
        self.lines.append(line)
