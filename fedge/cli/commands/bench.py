"""`fedge bench`."""

from __future__ import annotations

from typing import Annotated

import typer

SHAPES = "residual net with group norm, CIFAR shapes (GPU: ResNet-18)"
SHORT, LONG = "20 of 100 clients x 10, B 10, E 1", "20 of 100 clients x 60, B 10, E 1"
WORKLOADS = {  # as in `fedge.bench`, which needs torch; a test compares them
    "A": "F-MNIST CNN, 20 of 100 clients x 600, B 15",
    "B": "digits MLP 64-32-10, 20 of 100 clients, E 5, B 10",
    "C": "digits MLP, 200 of 1000 clients x 14, E 1",
    "D": "CIFAR-shaped CNN, 50 of 1000 clients x 50, B 10, E 1",
    "E": "VGG11, 20 of 100 clients x 500, B 15, E 5",
    "FA": "FedOVA with 2 labels per client on A",
    "FE": "FedOVA with 2 labels per client on E",
    "G": "Fisher L-BFGS on A",
    "R": f"{SHAPES}, {SHORT}",
    "R2": f"{SHAPES}, {LONG}",
    "L": f"two-layer LSTM of width 64, 20 characters, {SHORT}",
    "L2": f"two-layer LSTM of width 64, 20 characters, {LONG}",
    "U": f"two-layer GRU of width 64, 20 characters, {SHORT}",
    "U2": f"two-layer GRU of width 64, 20 characters, {LONG}",
    "T": f"four-layer transformer of width 32, 20 characters, {SHORT}",
    "T2": f"four-layer transformer of width 32, 20 characters, {LONG}",
    "TA": f"adapters of rank 4 on T, {SHORT}",
    "TA2": f"adapters of rank 4 on T, {LONG}",
}
LETTERS = "; ".join(f"{name}: {title}" for name, title in WORKLOADS.items()) + ". B is the batch size, E local epochs."


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[WORKLOAD]...", help=LETTERS, show_default="A B C")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that are timed; the median counts.")] = 5,
    precision: Annotated[str, typer.Option(help="fp32, or tf32 or bf16 on a GPU.")] = "fp32",
    compile: Annotated[bool, typer.Option("--compile", help="Compile recorded steps: slower start.")] = False,
    plain: Annotated[bool, typer.Option("--plain/--no-plain", help="Time the plain loop too.")] = True,
    agree: Annotated[bool, typer.Option("--check", help="Compare all engines' results; names: algorithms.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Where a round's time goes, section by section.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Time fixed workloads against a plain loop over clients.

    Ours and the loop take turns in one process, and the medians are compared.
    """
    from fedge.cli import bench as work

    work.bench(names, device, repeats, precision, compile, plain, agree, profile, json)
