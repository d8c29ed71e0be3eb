"""The target that experiment files state: the test accuracy until which rounds and megabytes are counted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fedge import toml
from fedge.checks import brief
from fedge.report.errors import ReportError
from fedge.runs import regular
from fedge.runs.experiments import EXPERIMENT_FILE, MOST


def stated_target(folders: Iterable[Path | str]) -> float | None:
    """What the experiments of these folders, of runs or of one run, aim at, if they agree."""
    found = {_stated(Path(folder)) for folder in folders}
    return found.pop() if len(found) == 1 else None


def _stated(path: Path) -> float | None:
    for folder in (path, path.resolve().parent):
        file = folder / EXPERIMENT_FILE
        if file.is_file():
            try:
                target = toml.loads(regular.content(file, MOST).decode()).get("target")
            except OSError as error:
                raise ReportError(f"cannot read {file}: {error.strerror or error}") from error
            except ValueError as error:
                raise ReportError(f"{file} is not TOML: {error}") from error
            if isinstance(target, bool) or not isinstance(target, int | float | None):
                raise ReportError(f"{file}: target is {brief(target)}, it must be a number such as 0.9")
            return target
    return None
