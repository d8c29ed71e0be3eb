"""The run folder: what a run leaves on disk, and how it is found again.

    config.toml     the resolved experiment         rounds.jsonl   one object per round
    ledger.jsonl    one object per ask              clients.json   examples by client and label
    checkpoint.pt   the state, atomic               summary.json   the result, once it is there

The checkpoint decides: whatever the other files hold beyond its round is cut off when a run goes on.
"""

from __future__ import annotations

import json
import math
import os
import platform
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedge import toml
from fedge.federation import Federation
from fedge.ledger import Row
from fedge.runs import atomic, checkpoint

Record = dict[str, Any]
MAY_DIFFER = {
    "train.rounds",
    "train.checkpoint_every",
    "train.device",
    "train.metrics",
    "train.until",
    "data.path",
}  # between the checkpoint and the run that goes on from it
LATER: dict[str, tuple[Any, ...]] = {
    "clip": (None, "none"),
    "inner_decay": (1.0,),
    "carry_momentum": (False,),
    "until": (None, "none"),
}  # fields that came after the first runs, and the values with which they do nothing
HEAT_MAP_CLIENTS = 1000


class RunFolderError(ValueError):
    """Something about the folder prevents the run; says what, and what to do."""


class RunFolder:
    """One run's files. `create` makes the folder or refuses; `reopen` finds the checkpoint or refuses."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def file(self, name: str) -> Path:
        return self.path / name

    @property
    def begun(self) -> bool:
        """Whether there is anything to lose: the first checkpoint comes before the first round."""
        rounds = self.file("rounds.jsonl")
        return self.file("checkpoint.pt").exists() or (rounds.exists() and rounds.stat().st_size > 0)

    def create(self, config: Mapping[str, Any], federation: Federation) -> None:
        """Start afresh; an earlier run in the same place is never overwritten."""
        if self.begun:
            raise RunFolderError(f"{self.path} already holds a run: resume it, or choose another folder")
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file: choose a folder for the run")
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self.write_config(config)
            atomic.write_atomically(self.file("clients.json"), _clients(federation))
            for name in ("rounds.jsonl", "ledger.jsonl"):
                self.file(name).write_bytes(b"")

    def write_config(self, config: Mapping[str, Any]) -> None:
        with self._writing():
            atomic.write_atomically(self.file("config.toml"), toml.dump(config).encode())

    def save(self, content: dict[str, Any]) -> None:
        """Make everything up to now permanent."""
        with self._writing():
            for name in ("rounds.jsonl", "ledger.jsonl"):
                with open(self.file(name), "ab") as file:
                    os.fsync(file.fileno())
            checkpoint.save(self.file("checkpoint.pt"), content)

    def append(self, records: list[Record], rows: Iterable[Row]) -> None:
        """More rounds. The ledger goes first, so that a round on record has its rows."""
        with self._writing():
            _append(self.file("ledger.jsonl"), [asdict(row) for row in rows])
            _append(self.file("rounds.jsonl"), records)

    def reopen(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The checkpoint, after a look whether it belongs to this configuration."""
        try:
            content = checkpoint.load(self.file("checkpoint.pt"))
        except checkpoint.CheckpointError as error:
            raise RunFolderError(f"cannot resume: {error}") from None
        difference = first_difference(content["config"], as_plain(config))
        if difference is not None:
            name, old, new = difference
            if name == "federation.checksum":
                raise RunFolderError(f"cannot resume {self.path}: its clients held other examples than these")
            raise RunFolderError(
                f"cannot resume {self.path}: its checkpoint was written with {name} = {old!r}, now it is {new!r}; "
                "restore that field or start another run"
            )
        return content

    def truncate(self, round: int) -> tuple[list[Record], list[Row]]:
        """Cut both records back to a round; returns what is left."""
        self.file("summary.json").unlink(missing_ok=True)  # it describes the former end
        records = self._cut("rounds.jsonl", lambda record: record["round"] <= round)
        rows = self._cut("ledger.jsonl", lambda row: row["round"] <= round)
        if [record["round"] for record in records] != list(range(1, round + 1)):
            raise RunFolderError(
                f"cannot resume {self.path}: the checkpoint is of round {round}, but rounds.jsonl has "
                f"{len(records)} of its rounds; the folder was changed by something else"
            )
        return records, [Row(**row) for row in rows]

    def _cut(self, name: str, keep: Any) -> list[Record]:
        path = self.file(name)
        if not path.exists():
            raise RunFolderError(f"cannot resume {self.path}: {name} is missing")
        kept = []
        for line in path.read_bytes().splitlines(keepends=True):
            record = _parse(line)
            if record is None or not keep(record):
                break
            kept.append((line, record))
        with self._writing():
            atomic.write_atomically(path, b"".join(line for line, _ in kept))
        return [record for _, record in kept]

    def finish(self, summary: Record) -> None:
        with self._writing():
            text = json.dumps(_finite(summary), indent=2) + "\n"
            atomic.write_atomically(self.file("summary.json"), text.encode())

    def _writing(self) -> _Writing:
        return _Writing(self.path)


class _Writing:
    """Turns the operating system's errors into one line that says what is safe."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise RunFolderError(
                f"cannot write to {error.filename or self.path}: {error.strerror or error}; make room or choose "
                "another folder. What the last checkpoint holds is intact"
            ) from error


def _append(path: Path, objects: list[Record]) -> None:
    """Whole lines in one write, so that a kill leaves at most one torn line at the end."""
    with open(path, "ab") as file:
        file.write("".join(json.dumps(_finite(one)) + "\n" for one in objects).encode())


def _finite(value: Any) -> Any:
    """JSON has no word for what is not finite: null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if line.endswith(b"\n") and isinstance(record, dict) else None


def _clients(federation: Federation) -> bytes:
    data = federation.data
    shown = min(federation.clients, HEAT_MAP_CLIENTS)
    labels = []
    if data.classes:
        for client in range(shown):
            y = data.train_y[federation.examples(client)]
            labels.append(torch.bincount(y, minlength=data.classes).tolist())
    table = {"clients": federation.clients, "classes": data.classes, "names": list(data.names), "labels": labels}
    table |= {"example": _kind(data.train_x), "target": _kind(data.train_y)}
    return json.dumps(table).encode()


def _kind(examples: Tensor) -> Record:
    """The shape and type of one of them."""
    return {"shape": list(examples.shape[1:]), "type": str(examples.dtype).removeprefix("torch.")}


def as_plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as it reads back from its file, so that two of them can be compared."""
    return tomllib.loads(toml.dump(config))


def does_nothing(name: str, value: Any) -> bool:
    """Whether a field that came later has the value with which a run is what it was before."""
    return name in LATER and value in LATER[name]


def first_difference(old: Any, new: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """(dotted name, old value, new value) of the first field that differs and must not."""
    if path in MAY_DIFFER:
        return None
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old and not does_nothing(key, new[key]))]:
            found = first_difference(old.get(key), new.get(key), f"{path}.{key}" if path else key)
            if found is not None:
                return found
        return None
    return None if old == new else (path, old, new)


def versions() -> dict[str, str]:
    """What ran: fedge, Python, torch, and the machine's kind."""
    try:
        fedge = version("fedge")
    except PackageNotFoundError:
        fedge = "unknown"
    return {
        "fedge": fedge,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
