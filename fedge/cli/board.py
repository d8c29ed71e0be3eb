"""Progress that also goes to TensorBoard, MLflow or Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedge.experiment import Experiment, Progress, Watch, slug
from fedge.report import Tracker, open_tracker
from fedge.runs.run import Record, Run


class Boards(Watch):
    """Trackers of each run, in its folder; passes everything on to what a person sees."""

    def __init__(self, shown: Watch, folder: Path, experiment: Experiment, kinds: Sequence[str]) -> None:
        self._shown, self._folder, self._experiment, self._kinds = shown, folder, experiment, kinds
        self._boards: dict[str, list[Tracker]] = {}

    def begin(self, label: str, progress: Progress) -> None:
        folder, config = self._folder / slug(label), self._experiment.config(label)
        self._boards[label] = [open_tracker(kind, folder, label, config) for kind in self._kinds]
        self._shown.begin(label, progress)

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
            board.close()
