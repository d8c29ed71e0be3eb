"""Sweeps on the command line: `fedge run` of a file with lists of values, and `fedge sweep show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click
import typer
from typer.core import TyperGroup

from fedge.cli.text import examples


class Sweeps(TyperGroup):
    """Says what runs a sweep, where a file is named in the place of a command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if self.get_command(ctx, word) is None and (word.endswith(".toml") or Path(word).exists()):
            does = f"fedge sweep show {word}` shows" if Path(word).is_dir() else f"fedge run {word}` runs"
            raise click.UsageError(f"`{does} a sweep; {word} is no command", ctx)
        return super().resolve_command(ctx, args)


sweep_app = typer.Typer(
    cls=Sweeps,
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
