"""The run folder: what a run leaves on disk, and how it is found again.

    config.toml     the resolved experiment         rounds.jsonl   one object per round
    ledger.jsonl    one object per ask              clients.json   examples by client and label
    checkpoint.pt   the state, atomic               summary.json   the result, once it is there
    good.pt         the last checkpoint known to be of use, while that is not checkpoint.pt (`fedge.runs.health`)
    best.pt         the state of the best round, if it is kept; while the checkpoint is written that has this round,
                    a new one is next_best.pt

The checkpoint decides: whatever the other files hold beyond its round is cut off when a run goes on.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedge import toml
from fedge.federation import Federation
from fedge.inputs import Inputs, flatten
from fedge.ledger import Row
from fedge.runs import atomic, checkpoint, lock
from fedge.runs.contents import as_rows, check_content, check_records
from fedge.runs.differences import as_plain, first_difference
from fedge.runs.lines import DamagedFile, Lines, finite

Record = dict[str, Any]
HEAT_MAP_CLIENTS = 1000
BEST, NEXT = "best.pt", "next_best.pt"
STATES = ("checkpoint.pt", "good.pt", BEST, NEXT)
RECORDS = ("rounds.jsonl", "ledger.jsonl")


class RunFolderError(ValueError):
    """Something about the folder prevents the run; says what, and what to do."""


class RunFolder:
    """One run's files. `create` makes the folder or refuses; `reopen` finds the checkpoint or refuses."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.lines = {name: Lines(self.path / name) for name in RECORDS}

    def file(self, name: str) -> Path:
        return self.path / name

    @property
    def begun(self) -> bool:
        """Whether there is anything to lose: the first checkpoint comes before the first round."""
        rounds = self.file("rounds.jsonl")
        return self.file("checkpoint.pt").exists() or (rounds.exists() and rounds.stat().st_size > 0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within it no other process writes here; the folder is made if it is not there."""
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file: choose a folder for the run")
        hold = lock.locked(self.path)
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                hold.__enter__()
            except lock.Held as error:
                raise RunFolderError(str(error)) from None
        try:
            yield
        finally:
            hold.__exit__(None, None, None)

    def create(self, config: Mapping[str, Any], federation: Federation, about: Mapping[str, Any] | None = None) -> None:
        """Start afresh; an earlier run in the same place is never overwritten. `about` is more about the clients."""
        if self.begun:
            raise RunFolderError(f"{self.path} already holds a run: resume it, or choose another folder")
        with self._writing():
            self.write_config(config)
            atomic.write_atomically(self.file("clients.json"), _clients(federation, about or {}))
            for lines in self.lines.values():
                lines.begin()

    def write_config(self, config: Mapping[str, Any]) -> None:
        with self._writing():
            atomic.write_atomically(self.file("config.toml"), toml.dump(config).encode())

    def save(self, content: dict[str, Any]) -> None:
        """Make everything up to now permanent."""
        with self._writing():
            for name in RECORDS:
                with open(self.file(name), "ab", opener=atomic.in_place) as file:
                    os.fsync(file.fileno())
            sums = {name: lines.sums() for name, lines in self.lines.items()}
            checkpoint.save(self.file("checkpoint.pt"), content | {"lines": sums})

    def keep_good(self) -> None:
        """The checkpoint stays as good.pt when the next one replaces it; nothing is copied."""
        with self._writing():
            if self.file("checkpoint.pt").exists():
                atomic.also_as(self.file("checkpoint.pt"), self.file("good.pt"))

    def drop_good(self) -> None:
        with self._writing():
            self.file("good.pt").unlink(missing_ok=True)

    def good_round(self) -> int | None:
        """The round of good.pt, if there is one that can be read."""
        try:
            return int(checkpoint.load(self.file("good.pt"))["round"])
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def save_best(self, content: dict[str, Any]) -> None:
        """A new best round, which counts once a checkpoint has it: see `settle_best`."""
        with self._writing():
            checkpoint.save(self.file(NEXT), content)

    def settle_best(self, round: int) -> None:
        """The new best round takes the place of the former one if the checkpoint, of `round`, has it; else it goes."""
        if not self.file(NEXT).exists():
            return
        try:
            counts = int(checkpoint.load(self.file(NEXT))["round"]) <= round
        except (ValueError, LookupError, TypeError):
            counts = False
        with self._writing():
            if counts:
                os.replace(self.file(NEXT), self.file(BEST))
            else:
                self.file(NEXT).unlink()

    def append(self, records: list[Record], rows: Iterable[Row]) -> None:
        """More rounds. The ledger goes first, so that a round on record has its rows."""
        with self._writing():
            self.lines["ledger.jsonl"].append(asdict(row) for row in rows)
            self.lines["rounds.jsonl"].append(records)

    def reopen(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The checkpoint, after a look whether it belongs to this configuration."""
        try:
            content = checkpoint.load(self.file("checkpoint.pt"))
            check_content(content)
        except checkpoint.CheckpointError as error:
            raise RunFolderError(f"cannot resume: {error}") from None
        difference = first_difference(content["config"], as_plain(config))
        if difference is not None:
            raise RunFolderError(f"cannot resume {self.path}: {_told(*difference)}")
        return content

    def truncate(self, content: Mapping[str, Any]) -> tuple[list[Record], list[Row]]:
        """Cut both records back to the checkpoint; returns what is left. They must be as they were written."""
        records, rows = self.recorded(content, "resume")
        with self._writing():
            self.file("summary.json").unlink(missing_ok=True)  # it describes the former end
            for name, count in zip(RECORDS, (len(records), len(rows)), strict=True):
                self.lines[name].cut(count)
        return records, rows

    def recorded(self, content: Mapping[str, Any], what: str) -> tuple[list[Record], list[Row]]:
        """Both records up to the checkpoint, which must be as they were written; `what` is what they are read for."""
        round = content["round"]
        try:
            records, rows = (self._kept(name, content) for name in RECORDS)
            check_records(records, rows, round)
            return records, as_rows(rows)
        except DamagedFile as error:
            raise RunFolderError(
                f"cannot {what} {self.path}: {error}; it was damaged or changed by something else since the checkpoint "
                f"of round {round}: restore it from a copy, or start another run"
            ) from None

    def _kept(self, name: str, content: Mapping[str, Any]) -> list[Record]:
        lines, sums = self.lines[name], content.get("lines")
        return lines.read_until(content["round"]) if sums is None else lines.read(sums[name])

    def finish(self, summary: Record) -> None:
        with self._writing():
            text = json.dumps(finite(summary), indent=2) + "\n"
            atomic.write_atomically(self.file("summary.json"), text.encode())

    def _writing(self) -> _Writing:
        return _Writing(self.path)


def _told(name: str, old: Any, new: Any) -> str:
    """In which way a run is another one than that in the folder, and what to do."""
    if name == "federation.checksum":
        return "its clients held other examples than these"
    if name.startswith("code."):
        file, was = name.removeprefix("code.").rpartition(".")[0], str(old)[:12]
        return (
            f"{file} has changed since the run began, its SHA-256 was {was}..., now it is {str(new)[:12]}...; restore "
            "the file, start another run, or go on with the folder's copy: leave out the experiment file and add "
            "--run-code"
        )
    return (
        f"its checkpoint was written with {name} = {old!r}, now it is {new!r}; restore that field or start another run"
    )


def way_back(folder: Path | str) -> str:
    """What to do about a run that went wrong after a checkpoint which is still there; nothing if there is none."""
    path, round = Path(folder), RunFolder(folder).good_round()
    if round is None:
        return ""
    move = f"move {path / 'good.pt'} to {path / 'checkpoint.pt'} and resume"
    return f"; the last checkpoint before it that was of use is that of round {round}: {move}"


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


def _clients(federation: Federation, about: Mapping[str, Any]) -> bytes:
    data = federation.data
    shown = min(federation.clients, HEAT_MAP_CLIENTS)
    labels = []
    if data.labelled:
        for client in range(shown):
            y = data.train_y[federation.examples(client)]
            labels.append(torch.bincount(y, minlength=data.classes).tolist())
    table = {"clients": federation.clients, "classes": data.classes, "names": list(data.names), "labels": labels}
    table |= {"example": _kind(data.train_x), "target": _kind(data.train_y)}
    table |= {"values": list(data.values)} if data.values else {}
    return json.dumps(table | dict(about)).encode()


def _kind(examples: Inputs) -> Any:
    """The shape and type of one of them; of several inputs by name, or in a list."""
    if not isinstance(examples, Tensor):
        parts, spec = flatten(examples)
        found = [_kind(part) for part in parts]
        return {"named": dict(zip(spec, found, strict=True))} if isinstance(spec, tuple) else {"parts": found}
    return {"shape": list(examples.shape[1:]), "type": str(examples.dtype).removeprefix("torch.")}


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
