"""Rounds for other tools to show: TensorBoard, MLflow and Weights & Biases, behind one interface.

with open_tracker("mlflow", "runs/mine", "mine") as tracker:
    fedge.train(algorithm, federation, rounds=10, on_round=tracker.log)
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedge.checks import choice
from fedge.report.errors import MissingExtra, ReportError
from fedge.report.labels import flatten
from fedge.report.series import is_number
from fedge.runs import atomic

log = logging.getLogger("fedge")
TAGS = {"up_bytes": "bytes/up", "down_bytes": "bytes/down", "seconds": "seconds"}
SETS = ("test_", "train_")
PACKAGES = {"tensorboard": "report", "mlflow": "mlflow", "wandb": "wandb"}  # and the extras that bring them


class Tracker(ABC):
    """Takes the record of every round; `on_round=tracker.log`.

    A tool that fails, as one whose server is away, does not end a run: that is said once, and it gets no more rounds.
    """

    failed = False

    def log(self, record: Mapping[str, Any]) -> None:
        """The numbers of one round; NaN and infinity are left out."""
        self._try(lambda: self.write(int(record["round"]), scalars(record)))

    def end(self) -> None:
        """No more rounds come."""
        self._try(self.close)

    def _try(self, what: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            what()
        except Exception as error:
            self.failed = True
            log.warning("%s gets no more rounds, the run goes on: %s", type(self).__name__, _line(error))

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by tag: `test_f1` is `test/f1`.

    >>> scalars({"round": 1, "test_f1": 0.5, "up_bytes": 7, "dropped": [{}]})
    {'test/f1': 0.5, 'bytes/up': 7, 'dropped': 1}
    """
    found: dict[str, float] = {}
    for key, value in record.items():
        if is_number(value) and (key in TAGS or key.startswith(SETS)):
            found[TAGS.get(key) or key.replace("_", "/", 1)] = value
    return found | {"dropped": len(record.get("dropped") or [])}


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as flat names and values: `algorithm.lr`."""
    return {key: value if is_number(value) else str(value) for key, value in flatten(dict(config)).items()}


def missing(package: str, what: str) -> MissingExtra:
    return MissingExtra(f"{what} needs {package}: pip install 'fedge[{PACKAGES[package]}]'", name=package)


class TensorBoard(Tracker):
    """One event file in a folder: `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing("tensorboard", "logging to TensorBoard") from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        self._writer.close()


def open_tracker(kind: str, folder: Path | str, title: str, config: Mapping[str, Any] | None = None) -> Tracker:
    """A tracker for one run: its folder, its name, and its configuration for the tools that show one."""
    choice("tracker", kind, TRACKERS)
    try:
        return TRACKERS[kind](Path(folder), title, config or {})
    except MissingExtra:
        raise
    except Exception as error:  # a server that is away, a folder that cannot be written, a project that is refused
        raise ReportError(
            f"cannot log to {kind}, {_line(error)}: see that it can be reached, or leave it out"
        ) from error


def _line(error: Exception) -> str:
    words = "".join(one if one.isprintable() else " " for one in str(error)[:2000])
    return f"{type(error).__name__}: {' '.join(words.split())[:300]}"


def _tensorboard(folder: Path, title: str, config: Mapping[str, Any]) -> Tracker:
    atomic.refuse_link(folder / "tensorboard")
    return TensorBoard(folder / "tensorboard")


def _mlflow(folder: Path, title: str, config: Mapping[str, Any]) -> Tracker:
    from fedge.report.mlflow_tracker import MLflow

    return MLflow(folder, title, config)


def _wandb(folder: Path, title: str, config: Mapping[str, Any]) -> Tracker:
    from fedge.report.wandb_tracker import WandB

    return WandB(folder, title, config)


TRACKERS: dict[str, Callable[[Path, str, Mapping[str, Any]], Tracker]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
