"""`fedge run`."""

from __future__ import annotations

from typing import Annotated

import typer

from fedge.cli.options import Device, Experiment, Json, Out, Quiet, Report, Resume, Settings, Verbose, finite


def run(
    experiment: Experiment = None,
    settings: Settings = None,
    out: Out = None,
    resume: Resume = False,
    device: Device = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json: Json = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Log for TensorBoard too.")] = False,
    track: Annotated[
        list[str] | None,
        typer.Option(metavar="TOOL", help="Log for tensorboard, mlflow or wandb (offline) too. Repeatable."),
    ] = None,
    report: Report = True,
    jobs: Annotated[int, typer.Option("--jobs", min=1, metavar="N", help="Runs at a time, one process each.")] = 1,
    rank_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=1, callback=finite, help="Under torchrun: how long to wait for another process."
        ),
    ] = 600.0,
    run_code: Annotated[
        bool,
        typer.Option("--run-code", help="With --resume: run the folder's copy of a file of yours that has changed."),
    ] = False,
) -> None:
    """Train every algorithm of an experiment and compare them.

    Without a file, the experiment that comes with fedge is run.

    Each algorithm gets its own folder in DIR, and all of them one report.

    A file with lists of values (seeds = [0, 1, 2], lr = {sweep = [0.05, 0.1]}) is a sweep: one run per combination.

    Ctrl-C stops cleanly, and --resume goes on from there.

    torchrun --nproc-per-node N -m fedge run shares the clients over N processes or GPUs.
    """
    from fedge.cli import run as work

    work.run(
        experiment,
        settings,
        out,
        resume,
        device,
        quiet,
        verbose,
        json,
        tensorboard,
        track,
        report,
        jobs,
        rank_timeout,
        run_code,
    )
