"""`fedge partition show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedge.cli.options import Experiment
from fedge.cli.text import examples

partition_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Look at who holds which examples.")


@partition_app.callback()
def _group() -> None:
    """Look at who holds which examples."""


@partition_app.command(
    epilog=examples(
        "fedge partition show", "fedge partition show digits.toml --set partition.labels=1 --out partition.png"
    )
)
def show(
    experiment: Experiment = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a field, such as partition.labels=1. Repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the heat map: .png, .svg or .pdf.")] = None,
    clients: Annotated[int, typer.Option(metavar="N", min=1, help="Show the first N clients.")] = 20,
    json: Annotated[bool, typer.Option("--json", help="Print the statistics as one JSON object.")] = False,
) -> None:
    """Show how an experiment deals its examples out, without training.

    Only the tables \\[data] and \\[partition] of the file are read.

    Without a file, the experiment that comes with fedge is shown.
    """
    from fedge.cli import partition as work

    work.show(experiment, settings, out, clients, json)
