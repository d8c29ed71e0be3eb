"""Accuracy against rounds, one panel per cell, the mean over the seeds with a band of one standard deviation."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from fedge.experiment.comparison import write_file
from fedge.sweep.entries import Entry, step_of
from fedge.sweep.store import Store

from .places import paper
from .tables import Cell, cells, title

SMOOTHED = 10  # rounds, as in the paper's figure of batch sizes
TEST_ACCURACY = ("noniid", "sharing", "clients")  # the tables in which the paper states it
FEW = 20  # rounds, up to which each has a mark
CHARACTERS = 13  # of the title to an inch
Rows = dict[str, dict[str, Cell]]  # label -> cell name -> its runs


def draw(entries: Sequence[Entry], store: Store, path: Path) -> Path | None:
    """Write the figure; None if nothing was run, or matplotlib is not there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    rows = cells(entries, store)
    grid = panels(entries, rows)
    if not grid:
        return None
    wide = max(map(len, grid))
    figure = Figure(figsize=(1 + 4.2 * wide, 0.4 + 3.2 * len(grid)), layout="constrained")
    for line, names in zip(figure.subplots(len(grid), wide, squeeze=False), grid, strict=True):
        for axes, name in zip(line, names, strict=False):
            _panel(axes, name, rows, entries)
        for axes in line[len(names) :]:
            axes.set_axis_off()
    dotted = "; dotted: where the paper ends" if entries[0].experiment in TEST_ACCURACY else ""
    data = dict.fromkeys(paper()["datasets"][entry.dataset] for entry in entries)
    what = f"{paper()['titles'][entries[0].experiment]}{f', {next(iter(data))}' if len(data) == 1 else ''}"
    figure.suptitle(fill(what + dotted, int(CHARACTERS * figure.get_figwidth())), fontsize=10)
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix.removeprefix("."), dpi=120, metadata={"Software": None})
    write_file(path, image.getvalue())
    return path


def panels(entries: Sequence[Entry], rows: Rows) -> list[list[str]]:
    """Cells with results, a line of panels per data set; one line if no data set has two."""
    by_data: dict[str, dict[str, None]] = {}
    for entry in entries:
        if any(_lines(row, entry.cell) for row in rows.values()):
            by_data.setdefault(entry.dataset, {})[entry.cell] = None
    grid = [list(names) for names in by_data.values()]
    return (
        grid if any(len(names) > 1 for names in grid) else [[name for names in grid for name in names]] if grid else []
    )


def _panel(axes: Any, name: str, rows: Rows, entries: Sequence[Entry]) -> None:
    experiment = entries[0].experiment
    window = SMOOTHED if experiment == "batch-epochs" else 1
    curves = {label: lines for label, row in rows.items() if (lines := _lines(row, name))}
    stated = {label: rows[label][name].paper for label in curves} if experiment in TEST_ACCURACY else {}
    shown = [
        _curve(axes, _named(label, rows[label][name]), lines, window, stated.get(label))
        for label, lines in curves.items()
    ]
    mean = f", mean of {window} rounds" if window > 1 else ""
    data, part = paper()["datasets"].get(name.split("-")[0], ""), title(name)
    several = len({entry.dataset for entry in entries}) > 1 and part != data
    axes.set(
        title=f"{data}, {part}" if several else part,
        xlabel="round",
        ylabel=f"test accuracy, %{mean}",
        ylim=limits(np.concatenate(shown)),
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _lines(row: dict[str, Cell], name: str) -> list[list[float]]:
    """The curves of a cell; while it has none, those of the setting that gave way to its own."""
    return [line["test_accuracy"] for line in row[name].good or row[name].earlier] if name in row else []


def _named(label: str, cell: Cell) -> str:
    return label if cell.good else f"{label}, {step_of(cell.earlier[0]['config']['algorithm'])}"


def limits(values: np.ndarray[Any, Any]) -> tuple[float, float]:
    """All of the end, without the depths of the first few rounds."""
    return max(0.0, float(np.percentile(values, 5)) - 5), min(100.0, float(values.max()) + 2)


def _curve(axes: Any, label: str, series: list[list[float]], window: int, stated: float | None) -> np.ndarray[Any, Any]:
    """Draws one method, and the paper's value for it; returns what it drew."""
    values = 100 * np.array([_smooth(one, window) for one in series])  # [seeds, rounds]
    middle: np.ndarray[Any, Any] = values.mean(0)
    wide = values.std(0)
    at = np.arange(1, len(middle) + 1)
    seeds = "1 seed" if len(series) == 1 else f"{len(series)} seeds"
    mark = "." if len(at) <= FEW else None
    (line,) = axes.plot(at, middle, label=f"{label} ({seeds})", linewidth=1.3, marker=mark)
    axes.fill_between(at, middle - wide, middle + wide, color=line.get_color(), alpha=0.2, linewidth=0)
    if stated is None:
        return middle
    axes.axhline(stated, color=line.get_color(), linewidth=1, linestyle=":")
    return np.append(middle, stated)


def _smooth(series: list[float], window: int) -> np.ndarray[Any, Any]:
    """The mean of a round and the ones that follow it, up to `window`."""
    values = np.array(series, dtype=float)
    return np.array([values[at : at + window].mean() for at in range(len(values))])
