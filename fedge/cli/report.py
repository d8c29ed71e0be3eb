"""`fedge report`."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fedge import toml
from fedge.checks import brief
from fedge.cli.errors import one_line
from fedge.experiment import EXPERIMENT_FILE, run_folders
from fedge.report import ReportError, write_report


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the page.", show_default="the folder of the runs")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Test accuracy, such as 0.9, to which rounds and MB are counted.", show_default=False),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Compare runs on one page with figures; it needs no network.

    RUN is a run folder, or a folder of run folders; they need not be finished.

    Every figure is written as PNG and SVG too.
    """
    with one_line():
        folders = [folder for path in runs for folder in _expand(path)]
        if out is None and len(runs) == 1:
            out = runs[0]
        page = write_report(folders, out, _target(runs) if target is None else target)
    typer.echo(str(page))
    if open_:
        webbrowser.open(page.resolve().as_uri())


def _expand(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ReportError(f"{path} is not a folder: name a run folder, such as runs/digits")
    found = run_folders(path)
    if not found:
        raise ReportError(f"{path} holds no run: expected a folder that `fedge run` wrote, such as runs/digits")
    return found


def _target(runs: list[Path]) -> float | None:
    """What the experiments themselves aim at, if they agree."""
    found = {_stated(path) for path in runs}
    return found.pop() if len(found) == 1 else None


def _stated(path: Path) -> float | None:
    for folder in (path, path.resolve().parent):
        file = folder / EXPERIMENT_FILE
        if file.is_file():
            try:
                target = toml.loads(file.read_text("utf-8")).get("target")
            except ValueError as error:
                raise ReportError(f"{file} is not TOML: {error}") from error
            if isinstance(target, bool) or not isinstance(target, int | float | None):
                raise ReportError(f"{file}: target is {brief(target)}, it must be a number such as 0.9")
            return target
    return None
