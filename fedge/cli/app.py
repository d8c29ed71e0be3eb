"""The commands, one file each, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from fedge import __version__
from fedge.cli.lazy import LOOK, Later, group
from fedge.cli.text import examples

COMMANDS = [
    Later(
        "run",
        "Train every algorithm of an experiment and compare them.",
        "fedge.cli.commands.run:run",
        examples(
            "fedge run",
            "fedge run digits.toml --set train.rounds=20 --set algorithm.lr=0.1",
            "fedge run --resume --out runs/digits",
            "fedge run sweep.toml --jobs 4",
        ),
    ),
    Later(
        "sweep",
        "Many runs of one experiment file: what is done, and the results.",
        "fedge.cli.commands.sweep:sweep_app",
        examples("fedge sweep show runs/steps"),
    ),
    Later(
        "report",
        "Compare runs on one page with figures; it needs no network.",
        "fedge.cli.commands.report:report",
        examples(
            "fedge report runs/digits --open",
            "fedge report runs/digits runs/digits-2 --out compared",
            "fedge report runs/digits --live",
        ),
    ),
    Later(
        "export",
        "Write the model that a run trained as a file that other programs read.",
        "fedge.cli.commands.export:export",
        examples("fedge export runs/digits/fedova fedova.onnx", "fedge export runs/digits/fedavg fedavg.safetensors"),
    ),
    Later(
        "attack",
        "Let a share of the clients lie, and see what each defence is worth.",
        "fedge.cli.commands.attack:attack",
        examples(
            "fedge attack --kind sign_flip --kind backdoor", "fedge attack mine.toml --share 0.2 --defence median"
        ),
    ),
    Later(
        "bench",
        "Time fixed workloads against a plain loop over clients.",
        "fedge.cli.commands.bench:bench",
        examples("fedge bench", "fedge bench B C --repeats 9", "fedge bench --check"),
    ),
    Later(
        "reproduce",
        "Repeat experiments of the paper and print its tables with our numbers beside them.",
        "fedge.cli.commands.reproduce:reproduce",
        examples(
            "fedge reproduce noniid --dataset fmnist --rounds 3 --seeds 1 --device cpu",
            "fedge reproduce tune noniid sharing clients --dataset fmnist --dataset kws --minutes 9",
        ),
    ),
    Later("data", "Get and check data sets.", "fedge.cli.commands.data:data_app"),
    Later("partition", "Look at who holds which examples.", "fedge.cli.commands.partition:partition_app"),
    Later("edge", "Look at the devices of the clients.", "fedge.cli.commands.edge:edge_app"),
    Later("deploy", "Run an experiment on a real fleet, over Flower.", "fedge.cli.commands.deploy:deploy_app"),
]

app = typer.Typer(
    cls=group(COMMANDS),
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    **LOOK,
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
