"""`fedge edge show` and `fedge edge fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedge.cli.options import Experiment
from fedge.cli.text import examples

edge_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Look at the devices of the clients.")


@edge_app.callback()
def _group() -> None:
    """Look at the devices of the clients."""


@edge_app.command(
    epilog=examples("fedge edge show --set edge.spread=10", "fedge edge show digits.toml --out devices.png")
)
def show(
    experiment: Experiment = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a field, such as edge.profile=phone. Repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw them: .png, .svg or .pdf.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write them as a file for edge.file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the statistics as one JSON object.")] = False,
) -> None:
    """Draw the population of devices of an experiment, without training.

    Without a file, or without a table \\[edge] in it, clients have phones.
    """
    from fedge.cli import edge as work

    work.show(experiment, settings, out, csv, json)


@edge_app.command(
    epilog=examples("fedge edge fit runs/fleet/fedavg --out devices.csv", "fedge run --set edge.file=devices.csv")
)
def fit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of one run on a real fleet.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the devices go.")] = Path("devices.csv"),
    json: Annotated[
        bool, typer.Option("--json", help="Print measured and predicted rounds as one JSON object.")
    ] = False,
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Run the Python files that the run's own parts are from.")
    ] = False,
) -> None:
    """Find the devices that reproduce the times of a real fleet.

    The experiment is simulated once, to count what every client had to do.
    """
    from fedge.cli import edge as work

    work.fit(run, out, json, run_code)
