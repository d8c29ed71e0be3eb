"""`fedge deploy`: the same experiment on a real fleet, over Flower."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedge.cli.options import Experiment, Json, Out, Quiet, Report, Resume, Settings, finite
from fedge.cli.text import examples

deploy_app = typer.Typer(no_args_is_help=True, help="Run an experiment on a real fleet, over Flower.")


@deploy_app.command(
    epilog=examples(
        "fedge deploy local",
        "fedge deploy local --nodes 5 mine.toml --set train.rounds=10",
        "fedge deploy local --resume --out runs/fleet",
    )
)
def local(
    experiment: Experiment = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="SuperNodes, one per client.", show_default="as the file says"),
    ] = None,
    settings: Settings = None,
    out: Out = None,
    resume: Resume = False,
    deadline: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", callback=finite, help="For one phase of a round.")
    ] = 120.0,
    min_replies: Annotated[int, typer.Option(min=1, metavar="N", help="Good replies that a phase needs.")] = 1,
    quiet: Quiet = False,
    json: Json = False,
    report: Report = True,
) -> None:
    """Start a fleet on this machine, run an experiment on it, and stop it.

    SuperLink, SuperExec and N SuperNodes on the loop-back address, with TLS and node keys made for this run alone.

    Progress, folders, report and Ctrl-C are those of `fedge run`.
    """
    from fedge.cli import deploy as work

    work.local(experiment, nodes, settings, out, resume, deadline, min_replies, quiet, json, report)


@deploy_app.command(epilog=examples("fedge deploy keys secrets --host 192.0.2.7 --host fleet.example.org --nodes 20"))
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them.")],
    host: Annotated[
        list[str], typer.Option(metavar="NAME", help="Address or name by which nodes reach the SuperLink. Repeatable.")
    ],
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="How many node keys.")],
    days: Annotated[int, typer.Option(min=1, metavar="N", help="How long the certificate is valid.")] = 365,
) -> None:
    """Make a CA, the SuperLink's certificate and one key per node."""
    from fedge.cli import deploy as work

    work.keys(folder, host, nodes, days)


@deploy_app.command(epilog=examples("fedge deploy check 192.0.2.7:8000 --root-certificates ca.crt --key node-0.key"))
def check(
    superlink: Annotated[str, typer.Argument(metavar="HOST:PORT")],
    root_certificates: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The fleet's ca.crt.", show_default=False)
    ] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="This node's private key.", show_default=False)
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Expect plain HTTP.")] = False,
) -> None:
    """Say whether this node can work with that SuperLink, and if not, why.

    Run it on the node's machine, before the node is started.
    """
    from fedge.cli import deploy as work

    work.check(superlink, root_certificates, key, insecure)
