"""`fedge reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedge.cli.options import finite


def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="Experiments, such as noniid; or tune. A wrong one lists all."),
    ],
    dataset: Annotated[
        list[str] | None,
        typer.Option(help="Such as fmnist. Repeatable; without it the study's first. A wrong one lists all."),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Only this one and its variants, such as FedOVA. Repeatable.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many: 0, 1, ...")] = 3,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Instead of those of the files.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    minutes: Annotated[
        float | None,
        typer.Option(min=0, callback=finite, help="Begin no phase after so long; the same command goes on."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for results and unfinished runs.")] = Path(
        "runs/reproduce"
    ),
    precision: Annotated[str, typer.Option(help="fp32; on a GPU also tf32 or bf16.")] = "fp32",
    compile: Annotated[bool, typer.Option("--compile", help="Compile recorded steps (GPU): slower start.")] = False,
    processes: Annotated[
        int, typer.Option("--jobs", min=1, help="Runs at a time, one process each: where one does not fill the GPU.")
    ] = 1,
    paper: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A clone of the repository, if this is not one.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only say which runs there are and which are done.")] = False,
) -> None:
    """Repeat experiments of the paper and print its tables with our numbers beside them.

    Every finished run is a line of DIR/results.jsonl and is not repeated: a command that was stopped or killed goes on
    where it was. `tune` chooses every method's settings on a held-out part of the training set; what it chose, or what
    comes with fedge, is used by the others.

    Exit code 3: the time was up, and there is more to do. 130: it was interrupted.
    """
    from fedge.cli import reproduce as work

    work.reproduce(
        names, dataset, method, seeds, rounds, device, minutes, out, precision, compile, processes, paper, plan
    )
