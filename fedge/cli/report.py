"""`fedge report`."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from pathlib import Path

import typer

from fedge.cli.errors import one_line
from fedge.experiment import run_folders
from fedge.report import ReportError, read_all, write_report
from fedge.report.series import check_target, has_no_accuracy
from fedge.report.targets import stated_target
from fedge.report.write import needs_matplotlib


def report(
    runs: list[Path],
    out: Path | None,
    target: float | None,
    open_: bool,
    live: bool,
    port: int,
    host: str,
    anyone: bool,
) -> None:
    """Compare runs on one page with figures; it needs no network."""
    with one_line():
        if target is not None:
            check_target(target)
        if live:
            _serve(runs, target, (host, port, anyone), open_)
            return
        folders = [folder for path in runs for folder in _expand(path)]
        if out is None and len(runs) == 1:
            out = runs[0]
        goal = stated_target(runs) if target is None else target
        page = write_report(folders, out, goal)
        if goal is not None and has_no_accuracy(read_all(folders)):
            typer.echo(f"target {goal:g} counts nothing: it is a test accuracy, and no run has one", err=True)
    typer.echo(str(page))
    if open_:
        webbrowser.open(page.resolve().as_uri())


def _serve(runs: list[Path], target: float | None, where: tuple[str, int, bool], open_: bool) -> None:
    """Serve the page until Ctrl-C; runs may begin, go on and end meanwhile."""
    with needs_matplotlib():
        from fedge.report.live import LivePage, server
    for path in runs:
        if not path.is_dir():
            raise ReportError(f"{path} is not a folder: name one that holds runs, or will")
    goal = stated_target(runs) if target is None else target
    page = LivePage(lambda: [folder for path in runs for folder in run_folders(path)], goal)
    with server(page, *where) as made:
        host, port = made.server_address[:2]
        name = host.decode() if isinstance(host, bytes) else str(host)
        address = f"http://{f'[{name}]' if ':' in name else name}:{port}/"
        typer.echo(f"{address}  (Ctrl-C ends it)")
        if open_:
            webbrowser.open(address)
        with suppress(KeyboardInterrupt):
            made.serve_forever()


def _expand(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ReportError(f"{path} is not a folder: name a run folder, such as runs/digits")
    found = run_folders(path)
    if not found:
        raise ReportError(f"{path} holds no run: expected a folder that `fedge run` wrote, such as runs/digits")
    return found
