"""Finished work as JSON lines, a file per problem. A line is one training run; nothing is ever rewritten."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Line = dict[str, Any]
Key = tuple[str, str, str, str, int, int]


def key(line: Line) -> Key:
    """What a run is: its kind (trial or run), problem, method, setting, rounds and seed."""
    setting = json.dumps(line["setting"], sort_keys=True)
    return line["kind"], line["problem"], line["method"], setting, line["rounds"], line["seed"]


def read(folder: Path) -> dict[Key, Line]:
    """All whole lines of a folder; one that was cut short by a kill does not count."""
    found: dict[Key, Line] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text().splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            found.setdefault(key(line), line)
    return found


class Store:
    """What was done before, there or here, and where new lines go."""

    def __init__(self, out: Path, before: Path = RESULTS) -> None:
        self.out = out
        self.lines = read(before) | read(out)

    def get(self, *wanted: Any) -> Line | None:
        return self.lines.get(wanted)

    def add(self, line: Line) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / f"{line['problem']}.jsonl"
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # other processes append to it too
            file.seek(max(0, file.seek(0, 2) - 1))
            cut = file.read() not in (b"", b"\n")
            file.write((("\n" if cut else "") + json.dumps(line) + "\n").encode())
        self.lines[key(line)] = line

    def of(self, kind: str, problem: str, method: str | None = None) -> list[Line]:
        return [
            line
            for line in self.lines.values()
            if (line["kind"], line["problem"]) == (kind, problem) and method in (None, line["method"])
        ]


def take(source: Path, target: Path = RESULTS) -> int:
    """Append what another folder has more; returns how many lines."""
    store, new = Store(target, target), read(source)
    added = [line for one, line in new.items() if one not in store.lines]
    for line in added:
        store.add(line)
    return len(added)
