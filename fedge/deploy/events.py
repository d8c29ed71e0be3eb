"""News of a run that goes on in another process: one JSON object per line, written there and shown here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedge.deploy.flower import Timing
from fedge.experiment import Progress, Watch
from fedge.runs.run import Record, Run

EVENTS, STOP = "events.jsonl", "stop"  # in the folder that server app and command line share


class Reporter(Watch):
    """Watches the runs in the server app; tells the command line if there is one, and Flower's log in any case."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def say(self, line: str) -> None:
        self._tell("say", line=line)

    def begin(self, label: str, progress: Progress) -> None:
        self._tell("begin", label, progress)

    def round(self, label: str, progress: Progress, record: Record) -> None:
        self._tell("round", label, progress, record=record)

    def end(self, label: str, progress: Progress, run: Run[Any]) -> None:
        self._tell("end", label, progress, stopped=run.stopped)

    def fail(self, label: str, progress: Progress, reason: str) -> None:
        self._tell("fail", label, progress, reason=reason)

    def phase(self, label: str, timing: Timing) -> None:
        self._tell("phase", label, timing=asdict(timing))

    def done(self, error: str | None = None) -> None:
        self._tell("done", error=error)

    def stop(self) -> bool:
        """Whether the user asked the runs to stop."""
        return self._folder is not None and (self._folder / STOP).exists()

    def _tell(self, event: str, label: str = "", progress: Progress | None = None, **more: Any) -> None:
        news = {"event": event, "label": label, "progress": None if progress is None else asdict(progress), **more}
        print(_line(news), file=sys.stderr, flush=True)
        if self._folder is not None:
            with open(self._folder / EVENTS, "a", encoding="utf-8") as file:
                file.write(json.dumps(news) + "\n")


def _line(news: dict[str, Any]) -> str:
    """The same for a log."""
    head = f"fedge: {news['label']}: " if news["label"] else "fedge: "
    record = news.get("record")
    if record is not None:
        dropped = "".join(f"; client {d['client']} dropped in '{d['task']}': {d['reason']}" for d in record["dropped"])
        accuracy = record.get("test_accuracy")
        shown = "" if accuracy is None else f", test accuracy {accuracy:.3f}"
        skipped = "; the round is skipped" if "skipped" in record else ""
        return f"{head}round {record['round']}, {record['seconds']:.1f} s{shown}{dropped}{skipped}"
    if timing := news.get("timing"):
        parts = f"{timing['start']:.1f} s to start, {timing['work']:.1f} s of work"
        return f"{head}round {timing['round']}, phase {timing['phase']}: {timing['seconds']:.1f} s, of these {parts}"
    return head + str(news.get("line") or news.get("reason") or news.get("error") or news["event"])


class Reader:
    """The command line's end: the news since the last look."""

    def __init__(self, folder: Path) -> None:
        self._path, self._read = folder / EVENTS, 0

    def news(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    return
                self._read += len(line)
                yield json.loads(line)
