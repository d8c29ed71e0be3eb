"""`fedge export`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from fedge.cli.errors import one_line
from fedge.cli.text import say
from fedge.experiment.loading import load_run
from fedge.runs.export import ExportError


def export(run: Path, path: Path, client: int | None, best: bool, run_code: bool) -> None:
    """Write the model that a run trained as a file that other programs read."""
    with one_line():
        found = load_run(run, best=best, run_code=run_code)
        try:
            found.save(path, client)
        except (ValueError, NotImplementedError) as error:  # what this algorithm has no file for
            raise ExportError(str(error)) from error
        except OSError as error:
            raise ExportError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
    say(Console(), f"{path}: {found!r}")
