"""Rounds as a run of Weights & Biases; offline unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedge import atomic
from fedge.report.trackers import Tracker, missing, plain

FOLDERS = ("wandb", ".wandb")  # one of these is the tool's


class WandB(Tracker):
    """Files in the run folder, for `wandb sync FOLDER/wandb/offline-run-*`; with WANDB_MODE=online they are sent.

    The project is WANDB_PROJECT, or the name of the folder that holds the run folder. A resumed run has its old id.
    """

    def __init__(self, folder: Path | str, title: str, config: Mapping[str, Any] | None = None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing("wandb", "logging to Weights & Biases") from error
        own = Path(folder).resolve()
        own.mkdir(parents=True, exist_ok=True)
        for name in FOLDERS:
            atomic.refuse_link(own / name)
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or own.parent.name,
            name=title,
            id=f"fedge-{zlib.crc32(str(own).encode()):08x}",
            dir=str(own),
            config=plain(config or {}),
            mode=mode,
            resume="allow" if os.environ.get("WANDB_MODE") == "online" else None,
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()
