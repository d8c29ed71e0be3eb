"""`fedge partition show`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from fedge.cli.errors import one_line
from fedge.cli.picture import save_picture
from fedge.cli.text import printable, to_json
from fedge.experiment import ExperimentError, load_federation
from fedge.federation import Federation
from fedge.report import partition_figure

CLIENTS = 20  # rows of the picture made of letters, unless more are asked for
WIDEST = 24  # letters of a client's name
SHADES = (None, "on grey19", "on blue", "on dark_cyan", "on green4", "on dark_goldenrod")


def show(experiment: Path | None, settings: list[str] | None, out: Path | None, clients: int, json: bool) -> None:
    """Show how an experiment deals its examples out, without training."""
    with one_line():
        federation = load_federation(experiment, settings or [])
        found = statistics(federation)
        if out is not None:
            _draw(federation, out)
    if json:
        each = {"labels": federation.label_counts().tolist()} if _labelled(federation) else targets(federation)
        typer.echo(to_json(found | each))
        return
    _print(Console(), federation, found, out, clients)


def statistics(federation: Federation) -> dict[str, Any]:
    """How many clients, examples and labels; a regression has no labels."""
    found = {
        "clients": federation.clients,
        "classes": federation.data.classes,
        "examples": len(federation.index),
        "examples_per_client": _spread(federation.sizes.numpy()),
    }
    if not _labelled(federation):
        return found
    return found | {"labels_per_client": _spread((federation.label_counts() > 0).sum(1).numpy())}


def _labelled(federation: Federation) -> bool:
    return federation.data.labelled


def targets(federation: Federation) -> dict[str, list[dict[str, float]]]:
    """The smallest, mean and largest target of every client of a regression."""
    mine = [federation.data.train_y[federation.examples(client)].double() for client in range(federation.clients)]
    return {
        "targets": [{"min": float(y.min()), "mean": float(y.mean()), "max": float(y.max())} for y in mine],
    }


def _spread(values: Any) -> dict[str, float]:
    return {"min": int(values.min()), "median": float(np.median(values)), "max": int(values.max())}


def _draw(federation: Federation, out: Path) -> None:
    if not _labelled(federation):
        raise ExperimentError("--out draws how many examples of each label there are, a regression has none: leave it")
    figure = partition_figure(federation.label_counts().tolist(), federation.data.names)
    save_picture(figure, out)


def _print(console: Console, federation: Federation, found: dict[str, Any], out: Path | None, rows: int) -> None:
    labelled = _labelled(federation)
    learnt = f"{found['classes']} labels" if labelled else "targets that are numbers (a regression)"
    console.print(f"{found['clients']} clients, {found['examples']} examples, {learnt}")
    for name in ("examples", "labels") if labelled else ("examples",):
        low, middle, high = found[f"{name}_per_client"].values()
        console.print(f"{name} per client: min {low}, median {middle:g}, max {high}")
    console.print()
    for line in heat_map(federation, console.width, rows) if labelled else numbers(federation, rows):
        console.print(line, highlight=False)
    if rows < federation.clients:
        note = f"The first {rows} of {federation.clients} clients; --clients {federation.clients} shows all."
        console.print(note, style="dim", highlight=False)
    if out is not None:
        console.print(f"\nPicture  {out}", soft_wrap=True, markup=False, highlight=False)


def heat_map(federation: Federation, width: int, rows: int = CLIENTS) -> list[Text]:
    """The first clients down, labels across, examples as numbers on a shade; a dot is none."""
    counts = federation.label_counts()[:rows].tolist()
    names = [printable(name) for name in federation.data.names] or [
        str(label) for label in range(federation.data.classes)
    ]
    clients = _clients(federation, len(counts))
    room, least = width - len(clients[0]) - 2, max(3, *(len(str(count)) + 1 for row in counts for count in row))
    wide = max(least, min(max(map(len, names)) + 1, room // len(names)))  # whole names where they fit
    fits = max(1, room // wide)
    most = max(max(row) for row in counts)
    across = "".join(f"{name[: wide - 1]:>{wide}}" for name in names[:fits])
    head = Text(f"{'label':>{len(clients[0])}}  ", "bold") + Text(across)
    lines = [head, *(_line(client, row[:fits], wide, most) for client, row in zip(clients, counts, strict=True))]
    return [*lines, Text(f"... and {len(names) - fits} more labels", "dim")] if len(names) > fits else lines


def numbers(federation: Federation, rows: int = CLIENTS) -> list[Text]:
    """The first clients down; how many examples each has, and its smallest, mean and largest target."""
    clients = _clients(federation, min(rows, federation.clients))
    head = Text(f"{'target':>{len(clients[0])}}  {'examples':>8}  {'min':>10}  {'mean':>10}  {'max':>10}", "bold")
    each = zip(clients, federation.sizes.tolist(), targets(federation)["targets"], strict=False)
    return [head, *(Text(f"{who}  {size:>8}  {_three(found)}") for who, size, found in each)]


def _three(found: dict[str, float]) -> str:
    return "  ".join(f"{found[name]:>10.4g}" for name in ("min", "mean", "max"))


def _clients(federation: Federation, rows: int) -> list[str]:
    """What the first clients are called, all equally wide."""
    named = [printable(federation.name(client)) if federation.names else f"client {client}" for client in range(rows)]
    wide = max(10, min(WIDEST, max(map(len, named))))
    return [f"{one if len(one) <= wide else one[: wide - 1] + '…':>{wide}}" for one in named]


def _line(client: str, row: list[int], wide: int, most: int) -> Text:
    line = Text(f"{client}  ")
    for count in row:
        shade = SHADES[0 if not count else 1 + (len(SHADES) - 2) * count // most]
        line.append(f"{count or '·':>{wide}}", shade or "dim")
    return line
