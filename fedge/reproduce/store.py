"""Results as JSON lines: one line a finished run, on disk before the next run begins."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedge.experiment import ExperimentError

Line = dict[str, Any]
LONG = 100  # rounds


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except ValueError:
        return False
    return True


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
        whole = self.path.read_bytes()
        if whole and not whole.endswith(b"\n") and _is_json(whole.splitlines()[-1]):
            with open(self.path, "ab") as file:
                file.write(b"\n")  # a kill just before it
            whole += b"\n"
        for number, raw in enumerate(whole.splitlines(keepends=True), 1):
            try:
                yield json.loads(raw)
            except ValueError:
                if raw.endswith(b"\n"):
                    raise ExperimentError(f"{self.path}, line {number}, is not JSON: repair or remove it") from None
                self._cut(len(whole) - len(raw))  # a kill in the middle of the last line

    def _cut(self, size: int) -> None:
        with open(self.path, "rb+") as file:
            file.truncate(size)

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
                file.write((json.dumps(line) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ExperimentError(f"cannot write {self.path}: {error.strerror}; choose another --out") from error
        self.lines.append(line)
