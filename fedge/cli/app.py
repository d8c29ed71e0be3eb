"""The commands, one file each, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from fedge import __version__
from fedge.cli.bench import bench
from fedge.cli.data import data_app
from fedge.cli.deploy import deploy_app
from fedge.cli.partition import partition_app
from fedge.cli.report import report
from fedge.cli.reproduce import reproduce
from fedge.cli.run import run
from fedge.cli.text import examples

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedge {__version__}")
        raise typer.Exit


@app.callback(
    epilog=examples(
        "fedge run",
        "fedge run digits.toml --set algorithm.lr=0.1",
        "fedge report runs/digits --open",
    )
)
def fedge(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Federated learning over many edge devices.

    Fast to simulate, honest about bytes.
    """


app.command(
    epilog=examples(
        "fedge run",
        "fedge run digits.toml --set train.rounds=20 --set algorithm.lr=0.1",
        "fedge run --resume --out runs/digits",
    )
)(run)
app.command(
    epilog=examples("fedge report runs/digits --open", "fedge report runs/digits runs/digits-2 --out compared")
)(report)
app.command(epilog=examples("fedge bench", "fedge bench B C --repeats 9", "fedge bench --check"))(bench)
app.command(
    epilog=examples(
        "fedge reproduce noniid --dataset fmnist --rounds 3 --seeds 1 --device cpu",
        "fedge reproduce tune noniid sharing clients --dataset fmnist --dataset kws --minutes 9",
    )
)(reproduce)
app.add_typer(data_app, name="data")
app.add_typer(partition_app, name="partition")
app.add_typer(deploy_app, name="deploy")
