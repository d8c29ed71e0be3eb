"""`fedge edge show` and `fedge edge fit`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedge.cli.errors import one_line
from fedge.cli.picture import save_picture
from fedge.cli.text import printable, to_json
from fedge.edge import Devices, Fleet
from fedge.edge.fit import FAST, Fitted, read
from fedge.edge.fit import fit as fit_devices
from fedge.edge.settings import Edge
from fedge.edge.table import write
from fedge.experiment import ExperimentError, edge_of, flops_of, load, load_federation
from fedge.experiment.errors import at as place
from fedge.experiment.own import copies_allowed
from fedge.experiment.planning import own_files
from fedge.report import devices_figure
from fedge.runs.experiments import records

BARS = " ▁▂▃▄▅▆▇█"
MOST = 100_000  # devices that are looked at
UNITS = {"flops": ("GFLOP/s", 1e9), "down": ("Mbit/s down", 1e6), "up": ("Mbit/s up", 1e6)}


def show(experiment: Path | None, settings: list[str] | None, out: Path | None, csv: Path | None, json: bool) -> None:
    """Draw the population of devices of an experiment, without training."""
    with one_line():
        found = load(experiment, settings or [])
        count = found.partition.get("clients") or load_federation(experiment, settings or []).clients
        clients = min(count, MOST)
        with place("edge"):
            fleet = (edge_of(found.edge) or Edge()).fleet(count)
        devices = fleet.devices(np.arange(clients))
        if csv is not None:
            _write(csv, devices, fleet.kinds)
        if out is not None:
            _draw(fleet, devices, out)
    told = statistics(fleet, devices)
    if json:
        typer.echo(to_json(told))
        return
    _print(Console(), told, devices, [file for file in (csv, out) if file is not None])
    if count > clients:
        typer.echo(f"These are the first {clients:,} of {count:,} devices; the others are drawn alike.")


def fit(run: Path, out: Path, json: bool, run_code: bool) -> None:
    """Find the devices that reproduce the times of a real fleet."""
    with one_line():
        found = fit_run(run, run_code)
        _write(out, found.devices, ("node",))
    told = {"clients": found.clients, "measured": found.measured, "predicted": found.predicted, "error": found.error}
    told |= {"ahead": found.ahead, "error_ahead": found.error_ahead}
    if json:
        typer.echo(to_json(told))
        return
    console = Console()
    rounds = len(found.measured)
    mean = [sum(values) / rounds for values in (found.measured, found.predicted)]
    console.print(
        f"{len(found.clients)} devices from {rounds} rounds: {mean[0]:.2f} s per round measured, {mean[1]:.2f} s "
        f"predicted, median error {100 * found.error:.0f} %{_ahead(found.error_ahead)}",
        soft_wrap=True,
        highlight=False,
    )
    if unseen := sorted(set(range(max(found.clients))) - set(found.clients)):
        console.print(
            f"No times of clients {', '.join(map(str, unseen[:10]))}{' and more' if unseen[10:] else ''}: the file has "
            "fewer rows than there are clients, so each of them draws one; add rows to give every client its own",
            soft_wrap=True,
            highlight=False,
        )
    if (found.devices.up == FAST).all():
        console.print(
            "The messages of this run are all of about one size, so what sending costs per byte cannot be told: it "
            "counts as latency, and a larger model would be sent in no more time",
            soft_wrap=True,
            highlight=False,
        )
    console.print(
        f"Written  {out} (watts are 0, for energy is not logged)", soft_wrap=True, markup=False, highlight=False
    )


def _write(file: Path, devices: Devices, kinds: tuple[str, ...]) -> None:
    try:
        write(file, devices, kinds)
    except OSError as error:
        raise ExperimentError(f"cannot write {file}: {error.strerror or error}; choose another place") from error


def _ahead(error: float | None) -> str:
    return "" if error is None else f" ({100 * error:.0f} % for a round that the devices were not fitted to)"


def fit_run(folder: Path, run_code: bool = False) -> Fitted:
    """The devices of a run folder."""
    if not (folder / "config.toml").is_file():
        raise ExperimentError(f"{folder} holds no config.toml: name the folder of one run, such as runs/fleet/fedavg")
    lines = records(folder)
    phases = read(lines, len(lines))
    if not phases and any("answers" in line for line in lines):
        raise ExperimentError(
            f"{folder} was asynchronous: its answers have no phases, by which devices are fitted; "
            "fit a run of the inner algorithm on the same fleet"
        )
    if not phases:
        raise ExperimentError(f"{folder} has no times of nodes: it must come from a real fleet (fedge deploy)")
    if not run_code and (code := own_files(folder / "config.toml")):
        raise ExperimentError(
            f"{folder} needs code that is not part of fedge ({', '.join(code)}): allow it, --run-code"
        )
    with copies_allowed() if run_code else nullcontext():
        experiment = load(folder / "config.toml", [f"train.rounds={max(one.at[0] for one in phases)}"])
    with place(str(folder)):
        return fit_devices(phases, flops_of(experiment))


def statistics(fleet: Fleet, devices: Devices) -> dict[str, Any]:
    """By kind: how many devices, and the 5 %, 50 % and 95 % of their speeds."""
    kinds = {}
    for at, name in enumerate(fleet.kinds):
        chosen = devices.kind == at
        rows = {key: _spread(getattr(devices, key)[chosen]) for key in UNITS} if chosen.any() else {}
        kinds[name] = {"devices": int(chosen.sum()), **rows}
    return {"devices": len(devices.kind), "kinds": kinds}


def _spread(values: Any) -> dict[str, float]:
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95]).tolist()
    return {"low": low, "median": middle, "high": high}


def _print(console: Console, told: dict[str, Any], devices: Devices, files: list[Path]) -> None:
    shown = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False)
    for title in ("devices", "", *(name for name, _ in UNITS.values())):
        shown.add_column(title, justify="right" if title == "" else "left", no_wrap=True)
    for kind, row in told["kinds"].items():
        cells = [_range(row[key], UNITS[key][1]) if key in row else "" for key in UNITS]
        shown.add_row(escape(printable(kind)), str(row["devices"]), *cells)
    console.print(shown)
    console.print("5 %, median and 95 % of each kind; all devices, from slow to fast:\n", style="dim", highlight=False)
    for key, (name, unit) in UNITS.items():
        console.print(f"{name:>11}  {histogram(getattr(devices, key) / unit)}", highlight=False)
    if files:
        console.print(f"\nWritten  {', '.join(map(str, files))}", soft_wrap=True, markup=False, highlight=False)


def _range(row: dict[str, float], unit: float) -> str:
    return " - ".join(f"{row[key] / unit:.3g}" for key in ("low", "median", "high"))


def histogram(values: Any, columns: int = 40) -> str:
    """Bars over a logarithmic axis from the slowest to the fastest."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        return f"all {low:.3g}"
    counts, _ = np.histogram(np.log(values), bins=columns)
    bars = "".join(BARS[-(-int(count) * (len(BARS) - 1) // int(counts.max()))] for count in counts)
    return f"{low:.3g} |{bars}| {high:.3g}"


def _draw(fleet: Fleet, devices: Devices, out: Path) -> None:
    names = [fleet.kinds[kind] for kind in devices.kind.tolist()]
    figure = devices_figure(devices.flops.tolist(), devices.up.tolist(), names)
    save_picture(figure, out)
