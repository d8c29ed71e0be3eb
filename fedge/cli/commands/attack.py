"""`fedge attack`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedge.cli.options import Device, Experiment, Json, Quiet, Settings

# As in `fedge.attacks`, which needs torch; tests compare them.
KINDS = ("sign_flip", "scaled", "constant", "little", "weight_liar", "free_rider", "label_flip", "ascent", "backdoor")
DEFENCES = ("mean", "median", "trimmed_mean", "krum", "clipped_mean", "bounded_mean")
USUAL = ("mean", "bounded_mean")


def attack(
    experiment: Experiment = None,
    kind: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(KINDS)}. Repeatable; without it all.", show_default=False)
    ] = None,
    share: Annotated[
        list[float] | None, typer.Option(help="The share of clients that lie. Repeatable.", show_default="0.1")
    ] = None,
    defence: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(DEFENCES)}, or with settings, such as krum,bad=4,keep=8. Repeatable.",
            show_default=", ".join(USUAL),
        ),
    ] = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the results there; what it has is not run again.")
    ] = None,
    device: Device = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Let a share of the clients lie, and see what each defence is worth.

    Without a file, the experiment that comes with fedge is attacked.

    Which clients lie is a matter of the seed; the same command gives the same numbers.
    """
    from fedge.cli import attack as work

    work.attack(experiment, kind, share, defence, settings, out, device, quiet, json)
