"""Progress that also goes to TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedge.experiment import Progress, Watch, slug
from fedge.report import TensorBoard
from fedge.runs.run import Record, Run


class Boards(Watch):
    """One log per run, in its folder; passes everything on to what a person sees."""

    def __init__(self, shown: Watch, folder: Path) -> None:
        self._shown, self._folder = shown, folder
        self._boards: dict[str, TensorBoard] = {}

    def begin(self, label: str, progress: Progress) -> None:
        self._boards[label] = TensorBoard(self._folder / slug(label) / "tensorboard")
        self._shown.begin(label, progress)

    def round(self, label: str, progress: Progress, record: Record) -> None:
        self._boards[label].log(record)
        self._shown.round(label, progress, record)

    def end(self, label: str, progress: Progress, run: Run[Any]) -> None:
        self._boards[label].close()
        self._shown.end(label, progress, run)

    def fail(self, label: str, progress: Progress, reason: str) -> None:
        self._boards[label].close()
        self._shown.fail(label, progress, reason)
