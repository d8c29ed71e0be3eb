"""Many runs one after another in one process: data loaded once, every result kept at once, every run resumable."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from fedge.data import Data
from fedge.engine import Simulator, TooFewReplies
from fedge.experiment import ExperimentError, build, parse
from fedge.experiment.comparison import check_folders
from fedge.experiment.device import find
from fedge.experiment.setup import deal, load_data
from fedge.experiment.training import basics_of, observe_of
from fedge.federation import Federation
from fedge.loop import train
from fedge.runs import atomic
from fedge.runs.folder import RunFolderError, versions
from fedge.runs.log import About
from fedge.runs.record import why_ended
from fedge.runs.run import Record, Run
from fedge.sweep.entries import Entry
from fedge.sweep.hardware import hardware
from fedge.sweep.store import Line, Store, hold

RESULTS = "results.jsonl"
CHECKPOINT_EVERY = {"cpu": 1}  # where a round of a large network takes minutes


class Stopped(Exception):
    """The user asked to stop, or the time is up; what was begun has a checkpoint."""


class Named(Protocol):
    """A run as a listener sees it; `str` is its name."""

    @property
    def rounds(self) -> int: ...


class Listener:
    """Is told of every run and round. This one does nothing."""

    def begin(self, entry: Named) -> None: ...

    def round(self, entry: Named, record: Record) -> None: ...

    def end(self, entry: Named, line: Line, new: bool) -> None: ...


@dataclass
class Runner:
    """Runs entries into `out`: results.jsonl, and the folders of runs that are not finished in runs/."""

    out: Path
    device: str = "auto"
    engine: dict[str, Any] = field(default_factory=dict)  # options of the simulator: precision, compile
    stop: Callable[[], bool] = lambda: False
    listener: Listener = field(default_factory=Listener)
    at_a_time: int = 1  # runs, with this one

    def __post_init__(self) -> None:
        self.device = find(self.device)
        self.store = Store(self.out / RESULTS)
        self._data: dict[str, Data | Federation] = {}
        self._federation: dict[str, Federation] = {}

    @property
    def all_engine(self) -> dict[str, Any]:
        """The options of the simulator, with those that were left out."""
        return {"precision": "fp32", "compile": False} | self.engine

    def run(self, entry: Entry, store: Store | None = None, folder: str | None = None) -> Line:
        """The result of an entry: as it is stored, or trained now, resumed if it was begun.

        A run in a named `folder` leaves it there, for a longer run of the same configuration to go on from.
        """
        store = self.store if store is None else store
        if (known := store.find(entry.key)) is not None:
            self.listener.end(entry, known, new=False)
            return known
        if self.stop():
            raise Stopped
        place = self._place(folder or entry.key)
        check_folders([place.parent, place])
        self.listener.begin(entry)
        try:
            line = self._line(entry, *self._train(entry, place))
        finally:
            release()
        store.add(line)
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)
        self.listener.end(entry, line, new=True)
        return line

    def is_begun(self, entry: Entry) -> bool:
        return self._place(entry.key).is_dir()

    def _place(self, folder: str) -> Path:
        return self.out / "runs" / folder

    def _train(self, entry: Entry, place: Path) -> tuple[Run[Any] | None, str | None]:
        """The finished run, or why there is none."""
        experiment = parse(entry.config | {"train": entry.config["train"] | {"device": self.device}})
        setup = build(experiment, self.loaded(entry.config["data"]))
        (algorithm,) = setup.algorithms.values()
        try:
            link = Simulator(algorithm, setup.federation, device=self.device, **self.engine)
            run = train(
                algorithm,
                setup.federation,
                **basics_of(setup.train),
                observe=replace(observe_of(setup.train), checkpoint_every=CHECKPOINT_EVERY.get(self.device, 10)),
                out=place,
                resume=place.is_dir(),
                about=About(str(entry), entry.config),
                link=setup.clocked(link),
                on_round=lambda record: self.listener.round(entry, record),
                stop=self.stop,
            )
        except RunFolderError:
            raise
        except TooFewReplies as error:  # it diverged: a result too, and not one that is worth repeating
            return None, why_ended(algorithm, error)
        except ValueError as error:  # what only shows once algorithm and data meet
            raise ExperimentError(f"{entry}: {error}") from error
        if run.stopped:
            raise Stopped
        return run, run.diverged

    def loaded(self, table: dict[str, Any]) -> Data | Federation:
        """The data of a table [data]; those of the last one are kept."""
        name = json.dumps(table, sort_keys=True)
        if name not in self._data:
            self._data = {name: load_data(table)}  # one at a time: the next experiment may use another
        return self._data[name]

    def federation(self, data: dict[str, Any], partition: dict[str, Any]) -> Federation:
        """The clients of two tables; those of the last ones are kept."""
        name = json.dumps([data, partition], sort_keys=True)
        if name not in self._federation:
            self._federation = {name: deal(partition, self.loaded(data))}
        return self._federation[name]

    def _line(self, entry: Entry, run: Run[Any] | None, failed: str | None) -> Line:
        from fedge import __version__

        head = {
            "key": entry.key,
            "experiment": entry.experiment,
            "cell": entry.cell,
            "label": entry.label,
            "seed": entry.seed,
        }
        tail = {
            "config": entry.config,
            "versions": versions() | {"fedge": __version__},  # also where fedge is not installed
            "hardware": hardware(self.device),
            "engine": self.all_engine,
            "at_a_time": self.at_a_time,
        }
        return head | {"rounds": entry.rounds, "failed": failed} | ({} if run is None else figures(run)) | tail


def locked(out: Path) -> AbstractContextManager[Any]:
    """A file that only one process holds at a time; it is free again when that process ends, however it ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / ".lock", "w", opener=atomic.in_place)  # noqa: SIM115
        hold(file, wait=False)
    except BlockingIOError:
        file.close()
        raise ExperimentError(f"another process is at work in {out}: wait for it, or choose another --out") from None
    except OSError as error:
        why = "it is a file" if out.is_file() else error.strerror
        raise ExperimentError(f"cannot write to {out}: {why}; choose another --out") from error
    return file


def release() -> None:
    """A run's recorded steps hold GPU memory until the collector finds their cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def figures(run: Run[Any]) -> Line:
    """What a run measured."""
    summary = run.summary()
    before = run.ledger.total(round=0)
    kept = ("final_accuracy", "final_rounds", "best_accuracy", "final_train_accuracy", "up_bytes", "down_bytes")
    return {name: _short(summary[name]) for name in kept} | {
        "setup_bytes": before["up"] + before["down"],
        "parameters": summary["parameters"],
        "dropped": summary["dropped"],
        "seconds_a_round": round(median(record["seconds"] for record in run.history), 4),
        "seconds": round(summary["seconds"], 1),
        "test_accuracy": series(run.history, "test_accuracy"),
        "train_accuracy": series(run.history, "train_accuracy"),
    }


def series(history: list[Record], name: str) -> list[float | None]:
    """One value per round, None where it was not evaluated; nothing if it never was."""
    values = [record.get(name) for record in history]
    return [_short(value) for value in values] if any(value is not None for value in values) else []


def _short(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value
