"""Progress that also goes to TensorBoard, MLflow or Weights & Biases."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedge.experiment import Experiment, Progress, Watch, slug
from fedge.report import ReportError, Tracker, open_tracker
from fedge.runs.run import Record, Run

log = logging.getLogger("fedge")


class Boards(Watch):
    """Trackers of each run, in its folder; passes everything on to what a person sees."""

    def __init__(self, shown: Watch, folder: Path, experiment: Experiment, kinds: Sequence[str]) -> None:
        self._shown, self._folder, self._experiment, self._kinds = shown, folder, experiment, kinds
        self._boards: dict[str, list[Tracker]] = {}

    def begin(self, label: str, progress: Progress) -> None:
        first, self._boards[label] = not self._boards, list[Tracker]()
        for kind in self._kinds:
            try:
                self._boards[label].append(self._open(kind, label))
            except ReportError as error:
                if first:
                    raise
                log.warning("%s is not logged, the run goes on: %s", label, error)
        self._shown.begin(label, progress)

    def _open(self, kind: str, label: str) -> Tracker:
        return open_tracker(kind, self._folder / slug(label), label, self._experiment.config(label))

    def round(self, label: str, progress: Progress, record: Record) -> None:
        for board in self._boards[label]:
            board.log(record)
        self._shown.round(label, progress, record)

    def end(self, label: str, progress: Progress, run: Run[Any]) -> None:
        self._close(label)
        self._shown.end(label, progress, run)

    def fail(self, label: str, progress: Progress, reason: str) -> None:
        self._close(label)
        self._shown.fail(label, progress, reason)

    def _close(self, label: str) -> None:
        for board in self._boards[label]:
            board.end()
