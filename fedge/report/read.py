"""A run folder as it lies on the disk, finished or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedge import toml
from fedge.report.errors import ReportError
from fedge.report.labels import distinct
from fedge.runs import regular
from fedge.runs.experiments import MOST, failure

Record = dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """What one run has written so far; files that are not there yet are empty."""

    path: Path
    name: str
    label: str
    config: Record
    rounds: tuple[Record, ...]
    ledger: tuple[Record, ...]
    clients: Record
    summary: Record
    source: str = ""  # config.toml, word for word
    stated: str = ""  # its label before it was told apart from others
    failed: str | None = None  # why, if it was tried and failed

    @property
    def judged_on(self) -> str:
        """`test`, or `validation` if a part of the training set stood in the place of the test set."""
        data = self.config.get("data")
        return "validation" if isinstance(data, dict) and data.get("validation") else "test"

    @property
    def finished(self) -> bool:
        return bool(self.summary)


def read_all(paths: Sequence[Path | str]) -> list[RunFolder]:
    """Every folder once, in the order given, with labels that tell the runs apart."""
    unique = list(dict.fromkeys(Path(path).resolve() for path in paths))
    if not unique:
        raise ReportError("no run folder was given: name at least one, such as runs/digits")
    return distinct([read(path) for path in unique])


def read(path: Path | str) -> RunFolder:
    """One run folder; only `rounds.jsonl` has to be there, or why there is none: the run failed."""
    folder = Path(path).resolve()
    _check(folder)
    source, config = _toml(folder / "config.toml")
    summary = _json(folder / "summary.json")
    name = str(summary.get("name") or config.get("name") or folder.name)
    label = str(summary.get("algorithm") or _algorithm(config) or name)
    return RunFolder(
        path=folder,
        name=name,
        label=label,
        stated=label,
        failed=summary.get("diverged") or failure(folder),
        config=config,
        rounds=_lines(folder / "rounds.jsonl"),
        ledger=_lines(folder / "ledger.jsonl"),
        clients=_json(folder / "clients.json"),
        summary=summary,
        source=source,
    )


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise ReportError(
            f"{folder} is not a folder: expected a run folder that holds rounds.jsonl, as `fedge run` writes it"
        )
    if not (folder / "rounds.jsonl").is_file() and failure(folder) is None:
        raise ReportError(
            f"{folder} holds no rounds.jsonl: expected a run folder as `fedge run` writes it, after its first round"
        )


def _algorithm(config: Record) -> Any:
    table = config.get("algorithm")
    return (table.get("label") or table.get("name")) if isinstance(table, dict) else table


def _lines(path: Path) -> tuple[Record, ...]:
    """One object a line. A last line that was cut off while it was written is left out."""
    lines = [(n, line) for n, line in enumerate(_text(path).splitlines(), 1) if line.strip()]
    records: list[Record] = []
    for number, line in lines:
        try:
            records.append(_object(json.loads(line)))
        except (ValueError, RecursionError) as error:
            if number == lines[-1][0]:
                break
            raise _broken(f"line {number} of {path}", "a JSON object", error) from error
    return tuple(records)


def _json(path: Path) -> Record:
    return _parsed(path, "a JSON object", lambda text: _object(json.loads(text)))


def _toml(path: Path) -> tuple[str, Record]:
    return _text(path), _parsed(path, "TOML", toml.loads)


def _parsed(path: Path, kind: str, parse: Callable[[str], Record]) -> Record:
    text = _text(path)
    try:
        return parse(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise _broken(str(path), kind, error) from error


def _text(path: Path) -> str:
    try:
        return regular.content(path, MOST).decode("utf-8", errors="replace") if path.is_file() else ""
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror or error}") from error


def _object(value: Any) -> Record:
    if not isinstance(value, dict):
        raise ValueError(f"found {type(value).__name__}")
    return value


def _broken(where: str, kind: str, error: Exception) -> ReportError:
    return ReportError(f"{where} is not {kind} ({error}): repair it, or run the experiment again")
