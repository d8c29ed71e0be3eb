"""Rounds as TensorBoard scalars, next to the run's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedge.report.errors import MissingExtra
from fedge.report.series import is_number

TAGS = {
    "test_accuracy": "test/accuracy",
    "test_loss": "test/loss",
    "train_accuracy": "train/accuracy",
    "train_loss": "train/loss",
    "up_bytes": "bytes/up",
    "down_bytes": "bytes/down",
    "seconds": "seconds",
}


class TensorBoard:
    """Writes one scalar for every number of a round's record.

    >>> board = TensorBoard("runs/digits/tensorboard")  # doctest: +SKIP
    >>> fedge.train(algorithm, federation, rounds=10, on_round=board.log)  # doctest: +SKIP
    """

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            message = "logging to TensorBoard needs tensorboard: pip install 'fedge[report]'"
            raise MissingExtra(message, name="tensorboard") from error
        self._writer: Any = SummaryWriter(str(folder))

    def log(self, record: dict[str, Any]) -> None:
        """The scalars of one round; NaN and infinity are left out."""
        step = record["round"]
        for key, tag in TAGS.items():
            if is_number(record.get(key)):
                self._writer.add_scalar(tag, record[key], step)
        self._writer.add_scalar("dropped", len(record.get("dropped") or []), step)

    def close(self) -> None:
        self._writer.close()
