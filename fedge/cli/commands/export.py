"""`fedge export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of one run, such as runs/digits/fedova.")],
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Ends in .safetensors, .pt, .pt2 or .onnx.")],
    client: Annotated[
        int | None, typer.Option(min=0, help="With the personal layers of this client.", show_default=False)
    ] = None,
    best: Annotated[bool, typer.Option("--best", help='The model of the best round: keep = "best".')] = False,
    run_code: Annotated[
        bool,
        typer.Option(
            "--run-code", help="Run the Python file that the run's own model or algorithm is from, or its copy."
        ),
    ] = False,
) -> None:
    """Write the model that a run trained as a file that other programs read.

    .safetensors and .pt hold the tensors by the names of the module; .onnx and .pt2 hold the computation too.
    """
    from fedge.cli import export as work

    work.export(run, path, client, best, run_code)
