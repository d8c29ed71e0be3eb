"""Options that several commands have: said once, so that they mean the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MOST = 1e8  # seconds or minutes: years


def finite(value: float | None) -> float | None:
    """For options that take a time: Python reads nan and inf as numbers too."""
    if value is not None and not value <= MOST:
        raise typer.BadParameter(f"{value} is not a number of at most {MOST:g}")
    return value


Experiment = Annotated[Path | None, typer.Argument(metavar="[EXPERIMENT.toml]")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a field, such as train.rounds=20. Repeatable."),
]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the runs.", show_default="runs/NAME")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with a run that was stopped: the newest, or the one in --out.")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say too how clients are computed, and why: fedge's log on stderr.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the results as one JSON object.")]
Report = Annotated[bool, typer.Option("--report/--no-report", help="Write a page with figures at the end.")]
