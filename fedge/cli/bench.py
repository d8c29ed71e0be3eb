"""`fedge bench`."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from fedge.bench import WORKLOADS, Timing, measure
from fedge.bench.check import NAMES, SETTINGS, check
from fedge.bench.split import around
from fedge.checks import nearest
from fedge.cli.errors import one_line
from fedge.cli.text import to_json
from fedge.experiment import ExperimentError
from fedge.experiment.device import find
from fedge.runs.folder import versions
from fedge.sweep.hardware import hardware

ON_A_CPU = ("A", "B", "C")


def bench(
    names: list[str] | None,
    device: str,
    repeats: int,
    precision: str,
    compile: bool,
    plain: bool,
    agree: bool,
    profile: bool,
    json: bool,
) -> None:
    """Time fixed workloads against a plain loop over clients."""
    console = Console(stderr=json)
    with one_line():
        place = find(device)
        if agree:
            raise typer.Exit(_check(console, place, names or []))
        chosen = [name.upper() for name in names or _usual(place)]
        _known(chosen, place)
        options = {"precision": precision, "compile": compile}
        how = options | {"compile": compile or None, "profile": profile}
        timings = [_one(name, place, repeats, plain, how, console) for name in chosen]
    if json:
        about = {"versions": versions(), "hardware": hardware(place), **options}
        typer.echo(to_json(about | {"timings": [figures(one) for one in timings]}))
        return
    console.print(_table(timings))
    for one in timings if profile else ():
        console.print(_sections(one))


def _known(names: list[str], device: str) -> None:
    for name in names:
        if name not in WORKLOADS:
            raise ExperimentError(f"workload is {name!r}, it must be one of {', '.join(WORKLOADS)}")
        if device.split(":")[0] not in WORKLOADS[name].devices:
            raise ExperimentError(f"workload {name} would take hours on {device}: it is for a GPU")


def _usual(device: str) -> list[str]:
    return list(ON_A_CPU) if device == "cpu" else list(WORKLOADS)


def _one(name: str, device: str, repeats: int, plain: bool, options: dict[str, Any], console: Console) -> Timing:
    console.print(f"{name}: {WORKLOADS[name].title}", highlight=False)
    try:
        return measure(WORKLOADS[name], device, repeats, plain, **options)
    except ValueError as error:  # options that this device does not have
        raise ExperimentError(str(error)) from error


def figures(timing: Timing) -> dict[str, Any]:
    derived = {"median": timing.median, "ratio": timing.ratio, "flops_a_second": timing.flops_a_second}
    return asdict(timing) | derived


def _table(timings: list[Timing]) -> Table:
    table = Table(box=None, pad_edge=False)
    columns = (
        "workload",
        "device",
        "s per round",
        "peer",
        "peer, s",
        "times faster",
        "GFLOP/s",
        "outside kernels",
        "around",
        "first, s",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("workload", "device", "peer") else "right")
    for one in timings:
        rate, plain = one.flops_a_second, statistics.median(one.plain) if one.plain else None
        table.add_row(
            one.workload,
            one.device,
            f"{one.median:.4f}",
            "–" if plain is None else one.peer,
            "–" if plain is None else f"{plain:.3f}",
            "–" if one.ratio is None else f"{one.ratio:.1f}",
            "–" if rate is None else f"{rate / 1e9:.0f}",
            "–" if one.outside is None else f"{one.outside:.0%}",
            "–" if one.around is None else f"{one.around:.0%}",
            f"{one.first:.1f}",
        )
    return table


def _sections(timing: Timing) -> Table:
    """The sections of a round: on a GPU the time in its stream counts, and the host runs ahead of it."""
    gpu = timing.split[0].gpu is not None
    table = Table(title=f"{timing.workload}, one round: {around(timing.split):.0%} around the clients' work", box=None)
    for column in ("section", "host, ms", *(["GPU, ms"] if gpu else []), "clients' work"):
        table.add_column(column, justify="right" if "ms" in column else "left")
    for one in timing.split:
        times = [f"{one.host:.3f}", *([] if one.gpu is None else [f"{one.gpu:.3f}"])]
        table.add_row(one.section, *times, "yes" if one.clients else "")
    return table


def _check(console: Console, device: str, names: list[str]) -> int:
    """Every engine against the loop-back link; the exit code says whether all agreed."""
    for name in names:
        if name not in NAMES:
            raise ExperimentError(f"algorithm is {name!r}{nearest(name, NAMES)}, it must be one of {', '.join(NAMES)}")
    bad = []
    for gap in check(device, names or NAMES):
        line = f"{gap.size:8.1e}  {gap.algorithm}, {gap.engine}"
        console.print(f"{'ok' if gap.agrees else 'DIFFERS':8}{line}", highlight=False)
        bad += [] if gap.agrees else [line]
    slack = ", ".join(f"{one.tolerance:g} in {one.name}" for one in SETTINGS)
    console.print(f"{len(bad)} differ by more than {slack}:" if bad else f"All agree to {slack}.", highlight=False)
    console.print("\n".join(bad), highlight=False)
    return 1 if bad else 0
