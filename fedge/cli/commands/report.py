"""`fedge report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
    live: Annotated[bool, typer.Option("--live", help="Serve the page, and follow runs that go on.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="For --live; 0 is any that is free.")] = 0,
    host: Annotated[str, typer.Option(help="For --live: the address to listen on.")] = "127.0.0.1",
    anyone: Annotated[bool, typer.Option("--anyone", help="For --live: let --host be one that others reach.")] = False,
) -> None:
    """Compare runs on one page with figures; it needs no network.

    RUN is a run folder, or a folder of run folders; they need not be finished.

    Every figure is written as PNG and SVG too.

    With --live nothing is written: the page is served on this machine until Ctrl-C.
    """
    from fedge.cli import report as work

    work.report(runs, out, target, open_, live, port, host, anyone)
