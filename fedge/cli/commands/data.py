"""`fedge data list|get|check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedge.cli.text import examples

Source = Annotated[Path | None, typer.Option("--from", metavar="PATH", help="A local copy: a file or a folder.")]


data_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Get and check data sets.")


@data_app.command("list", epilog=examples("fedge data list"))
def list_() -> None:
    """List the data sets, and where each is on this machine."""
    from fedge.cli import data as work

    work.list_()


@data_app.command(
    epilog=examples("fedge data get fashion_mnist", "fedge data get speech_commands --from kws_mfcc_50x16.npz")
)
def get(name: Annotated[str, typer.Argument(metavar="NAME")], source: Source = None) -> None:
    """Download a data set from its official address, or copy it from a local copy.

    Every file is checked before it is kept. FEDGE_DATA names another folder than the user's cache.
    """
    from fedge.cli import data as work

    work.get(name, source)


@data_app.command(epilog=examples("fedge data check", "fedge data check cifar10 --from cifar-10-python.tar.gz"))
def check(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...")] = None, source: Source = None
) -> None:
    """Read data sets completely and compare them with the official checksums.

    Without a name, all that are on this machine; what is damaged or missing is an error.
    """
    from fedge.cli import data as work

    work.check(names, source)
