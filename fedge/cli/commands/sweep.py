"""Sweeps on the command line: `fedge run` of a file with lists of values, and `fedge sweep show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedge.cli.text import examples

sweep_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Many runs of one experiment file: what is done, and the results.",
)


@sweep_app.command("show", epilog=examples("fedge sweep show runs/steps"))
def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    json: Annotated[bool, typer.Option("--json", help="Print the runs as one JSON object.")] = False,
) -> None:
    """List the runs of a sweep, which are done and which failed, and the results so far.

    DIR is the folder that `fedge run` made, such as runs/steps. Nothing is changed; runs may be going on.
    """
    from fedge.cli import sweep as work

    work.show(folder, json)
