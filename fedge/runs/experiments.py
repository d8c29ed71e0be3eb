"""Folders of an experiment: DIR/experiment.toml, one run folder per algorithm, and the report beside them."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from fedge.runs import atomic, regular
from fedge.runs.lines import parse

EXPERIMENT_FILE = "experiment.toml"
FAILURE_FILE = "failure.json"
MOST = 1 << 30  # bytes of a file that is looked at
SIGNS = re.compile(r"(?P<plus>(?<=\de)\+(?=\d))|(?P<minus>\s*=\s*-(?=[\d.]))|[^\w.]+")


def slug(text: str) -> str:
    """A label as a folder name.

    >>> slug("Data sharing, beta = 0.1")
    'data-sharing-beta-0.1'
    >>> slug("lr=1e+30 seed=-1")
    'lr-1e+30-seed--1'
    """
    text = unicodedata.normalize("NFKC", text).lower()
    return SIGNS.sub(_between, text).strip("-._")


def _between(found: re.Match[str]) -> str:
    """A hyphen for what stands between words; the sign of a number after = or of its exponent stays."""
    return found["plus"] or ("--" if found["minus"] else "-")


def is_run(folder: Path) -> bool:
    return (folder / "rounds.jsonl").is_file() or (folder / "checkpoint.pt").is_file()


def is_tried(folder: Path) -> bool:
    """Whether it is a run's, or that of one which failed before it had anything to keep."""
    return is_run(folder) or failure(folder) is not None


def run_folders(folder: Path, tried: bool = False) -> list[Path]:
    """The folder itself if it is a run's, else those in it: oldest first, the order in which they were started.

    With `tried`, also those of runs that failed before their first round.
    """
    is_one = is_tried if tried else is_run
    if is_one(folder):
        return [folder]
    found = [one for one in folder.iterdir() if is_one(one)] if folder.is_dir() else []
    return sorted(found, key=lambda one: (_born(one), one.name))


def holds_runs(folder: Path) -> bool:
    return (folder / EXPERIMENT_FILE).exists() or bool(run_folders(folder))


def fresh(root: Path, name: str) -> Path:
    """root/name, or the first of root/name-2, root/name-3, ... that holds no run."""
    return next(folder for folder in _numbered(root, name) if not holds_runs(folder))


def earlier(root: Path, name: str) -> list[Path]:
    """The folders of the experiments with this name, newest first."""
    pattern = re.compile(rf"{re.escape(slug(name))}(-\d+)?")
    found = [one.parent for one in root.glob(f"*/{EXPERIMENT_FILE}") if pattern.fullmatch(one.parent.name)]
    return sorted(found, key=_touched, reverse=True)


def is_finished(run: Path, rounds: int, until: bool = False) -> bool:
    """Whether a run has its summary, and of no fewer rounds than are wanted now; with `until` it may have ended."""
    try:
        summary: Any = json.loads(regular.content(run / "summary.json", MOST))
        return bool(summary["rounds"] >= rounds or (until and summary.get("ended")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError):
        return False


def note_failure(run: Path, why: str) -> None:
    """Leave in the folder of a run why it failed, for whoever looks at it later."""
    run.mkdir(parents=True, exist_ok=True)
    atomic.write_atomically(run / FAILURE_FILE, (json.dumps({"failed": why}) + "\n").encode())


def failure(run: Path) -> str | None:
    """Why a run failed when it was last tried, or None."""
    try:
        return str(json.loads(regular.content(run / FAILURE_FILE, MOST))["failed"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def forget_failure(run: Path) -> None:
    (run / FAILURE_FILE).unlink(missing_ok=True)


def records(run: Path) -> list[dict[str, Any]]:
    """The rounds a run has on record so far, for a look at it; torn and damaged lines do not count."""
    path = run / "rounds.jsonl"
    lines = regular.content(path, MOST).split(b"\n")[:-1] if path.is_file() else []
    return [record for line in lines if (record := parse(line)) is not None and _is_whole(record)]


def _is_whole(record: dict[str, Any]) -> bool:
    numbers = all(isinstance(record.get(name), int) for name in ("round", "up_bytes", "down_bytes"))
    return numbers and all(isinstance(record.get(f"test_{name}"), int | float | None) for name in ("accuracy", "loss"))


def _numbered(root: Path, name: str) -> Iterator[Path]:
    yield root / slug(name)
    for number in count(2):
        yield root / f"{slug(name)}-{number}"


def _born(run: Path) -> float:
    """When a run began: its configuration is written once."""
    path = run / "config.toml"
    return path.stat().st_mtime if path.is_file() else 0.0


def _touched(folder: Path) -> float:
    """When anything in it last changed."""
    files = [folder / EXPERIMENT_FILE, *folder.glob("*/rounds.jsonl")]
    return max(path.stat().st_mtime for path in files)
