"""The run folder: what a run leaves on disk, and how it is found again.

    config.toml     the resolved experiment         rounds.jsonl   one object per round
    ledger.jsonl    one object per ask              clients.json   examples by client and label
    checkpoint.pt   the state, atomic               summary.json   the result, once it is there
    good.pt         the last checkpoint known to be of use, while that is not checkpoint.pt (`fedge.runs.health`)
    best.pt         the state of the best round, if it is kept

The checkpoint decides: whatever the other files hold beyond its round is cut off when a run goes on.
"""

from __future__ import annotations

import json
import os
import platform
import tomllib
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
from fedge.runs.lines import DamagedFile, Lines, finite

Record = dict[str, Any]
MAY_DIFFER = {
    "train.rounds",
    "train.checkpoint_every",
    "train.device",
    "train.metrics",
    "train.keep",
    "train.until",
    "train.per_client",
    "data.path",
}  # between the checkpoint and the run that goes on from it
LATER: dict[str, tuple[Any, ...]] = {
    "clip": (None, "none"),
    "inner_decay": (1.0,),
    "carry_momentum": (False,),
    "products": ("same",),
    "quintics": ("jordan",),
    "dampings": ((), []),
    "direction": ("pairs",),
    "until": (None, "none"),
    "keep": ("last",),
    "way": (None, "none"),
    "sampling": (None, "none"),
    "metrics": ((), []),
    "per_client": (False,),
    "loss": ("cross_entropy",),
    "width": (1.0,),
    "server_lr_decay": (1.0,),
    "server_warmup": (0,),
    "head": ("",),
    "classes": (None, "none"),
    "of": ("client",),
    "balanced": (False,),
    "portion": (1.0,),
    "warm_up": (0,),
    "warm_up_lr": (None, "none"),
    "standardised": (False,),
    "dropout": (0.0,),
}  # fields that came after the first runs, and the values with which they do nothing
LATER_FOR_SOME: dict[str, tuple[Any, ...]] = {
    "server_momentum": (0.0,),
    "server_optimiser": ("sgd",),
    "server_betas": ([0.9, 0.99], (0.9, 0.99)),
    "server_eps": (0.001,),
}  # FedCM and SCAFFOLD got these later, FedAvg had them from the start: a run may go on, but its name has them
HEAT_MAP_CLIENTS = 1000
BEST = "best.pt"
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
                with open(self.file(name), "ab") as file:
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
        with self._writing():
            checkpoint.save(self.file(BEST), content)

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
            name, old, new = difference
            if name == "federation.checksum":
                raise RunFolderError(f"cannot resume {self.path}: its clients held other examples than these")
            if name.startswith("code."):
                file, was = name.removeprefix("code.").rpartition(".")[0], str(old)[:12]
                raise RunFolderError(
                    f"cannot resume {self.path}: {file} has changed since the run began, its SHA-256 was {was}..., now "
                    f"it is {str(new)[:12]}...; restore the file, or start another run"
                )
            raise RunFolderError(
                f"cannot resume {self.path}: its checkpoint was written with {name} = {old!r}, now it is {new!r}; "
                "restore that field or start another run"
            )
        return content

    def truncate(self, content: Mapping[str, Any]) -> tuple[list[Record], list[Row]]:
        """Cut both records back to the checkpoint; returns what is left. They must be as they were written."""
        round = content["round"]
        try:
            records, rows = (self._kept(name, content) for name in RECORDS)
            check_records(records, rows, round)
        except DamagedFile as error:
            raise RunFolderError(
                f"cannot resume {self.path}: {error}; it was damaged or changed by something else since the checkpoint "
                f"of round {round}: restore it from a copy, or start another run"
            ) from None
        with self._writing():
            self.file("summary.json").unlink(missing_ok=True)  # it describes the former end
            for name, kept in zip(RECORDS, (records, rows), strict=True):
                self.lines[name].cut(len(kept))
        return records, as_rows(rows)

    def _kept(self, name: str, content: Mapping[str, Any]) -> list[Record]:
        lines, sums = self.lines[name], content.get("lines")
        return lines.read_until(content["round"]) if sums is None else lines.read(sums[name])

    def finish(self, summary: Record) -> None:
        with self._writing():
            text = json.dumps(finite(summary), indent=2) + "\n"
            atomic.write_atomically(self.file("summary.json"), text.encode())

    def _writing(self) -> _Writing:
        return _Writing(self.path)


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


def as_plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as it reads back from its file, so that two of them can be compared."""
    return tomllib.loads(toml.dump(config))


def does_nothing(name: str, value: Any) -> bool:
    """Whether a field that came later has the value with which a run is what it was before."""
    return name in LATER and value in LATER[name]


def _did_nothing(name: str, value: Any) -> bool:
    """The same of a field that is not in an earlier run's folder."""
    return does_nothing(name, value) or (name in LATER_FOR_SOME and value in LATER_FOR_SOME[name])


def first_difference(old: Any, new: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """(dotted name, old value, new value) of the first field that differs and must not."""
    if path in MAY_DIFFER or (path.startswith("code.") and path.endswith(".path")):  # a file may move
        return None
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old and not _did_nothing(key, new[key]))]:
            found = first_difference(old.get(key), new.get(key), f"{path}.{key}" if path else key)
            if found is not None:
                return found
        return None
    return None if old == new or _same_loss(path, old, new) else (path, old, new)


def _same_loss(path: str, old: Any, new: Any) -> bool:
    """The default had another name before it took floating-point targets."""
    return path.endswith("loss") and {old, new} == {"cross_entropy", "by_target"}


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
