"""`fedge attack`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedge.attacks import KINDS
from fedge.attacks.study import MEAN, NONE, RECOMMENDED, Line, cases, on_data, study
from fedge.cli.errors import one_line
from fedge.cli.text import percent, say, to_json
from fedge.experiment import build, load

RESULTS = "attacks.jsonl"


def attack(
    experiment: Path | None,
    kind: list[str] | None,
    share: list[float] | None,
    defence: list[str] | None,
    settings: list[str] | None,
    out: Path | None,
    device: str | None,
    quiet: bool,
    json: bool,
) -> None:
    """Let a share of the clients lie, and see what each defence is worth."""
    chosen = [*(settings or []), *([] if device is None else [f"train.device={device}"])]
    with one_line():
        console = Console(stderr=json, quiet=quiet)
        planned = load(experiment, chosen)
        shares = share or [0.1]
        defences = defence or [MEAN, RECOMMENDED]
        wanted = list(cases(planned, kind or list(KINDS), shares, defences))
        setup = build(planned)
        wanted = on_data(wanted, setup.federation) if planned.code else wanted
        say(console, f"{len(wanted)} runs of {planned.name}, {setup.train['rounds']} rounds each")
        place = None if out is None else out / RESULTS
        found = study(wanted, setup, place, lambda line: say(console, _text(line)))
    for label in planned.labels:
        for one in shares:
            console.print()
            console.print(_table(label, one, found, defences, kind or list(KINDS)))
    if json:
        typer.echo(to_json({"name": planned.name, "runs": found}))


def _text(line: Line) -> str:
    liars = "all honest" if line["kind"] == NONE else f"{line['kind']} by {100 * line['share']:g} %"
    return f"{line['algorithm']}, {line['defence']}, {liars}: {_result(line)}"


def _result(line: Line) -> str:
    if line["final"] is None:
        return f"collapses after {line['rounds']} rounds"
    opened = f", opens {percent(line['opened'])} %" if line["kind"] == "backdoor" else ""
    return f"{percent(line['final'])} %{opened}"


def _table(label: str, share: float, found: Sequence[Line], defences: Sequence[str], kinds: Sequence[str]) -> Table:
    """Attacks down, defences across: the final accuracy, and of a back door how often it opened."""
    title = f"{escape(label)}: final accuracy, %, with {100 * share:g} % of the clients lying"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("attack")
    for defence in defences:
        table.add_column(defence, justify="right")
    cell = {(one["kind"], one["defence"]): one for one in found if one["algorithm"] == label and _is(one, share)}
    for kind in (NONE, *kinds):
        table.add_row(kind, *(_result(cell[kind, defence]).replace(" %", "") for defence in defences))
    return table


def _is(line: Line, share: float) -> bool:
    return bool(line["kind"] == NONE or line["share"] == share)
