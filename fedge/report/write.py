"""Reports on the disk: the page, and every figure as PNG and SVG beside it."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedge.report.errors import MissingExtra, ReportError
from fedge.report.labels import distinct
from fedge.report.read import RunFolder, read, read_all
from fedge.report.series import check_target, default_target
from fedge.runs import atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedge.report.figures import Picture


def write_report(paths: Sequence[Path | str], out: Path | str | None = None, target: float | None = None) -> Path:
    """Write report.html and figures/ for these run folders, and return the page's path.

    They go to `out`, else to the run's own folder, else to the folder all runs share. `target` is
    the test accuracy (a fraction) to which rounds and MB are counted; by default 90 % of the best
    accuracy of any run, rounded down to a whole percent.
    """
    with needs_matplotlib():
        from fedge.report.svg import alone
    runs = read_all(paths)
    if target is not None:
        check_target(target)
    folder = _folder(runs, out)
    _check_own(folder / "figures")
    text, drawn = compose(runs, target)
    with _shown(runs):  # before anything is written: some of it cannot be drawn as PNG, or is no text
        content = text.encode()
        images = {f"{picture.name}.png": _png(picture.figure) for picture, _ in drawn}
        images |= {f"{picture.name}.svg": alone(svg).encode() for picture, svg in drawn}
    for name, image in images.items():
        _replace(folder / "figures" / name, image)
    return _replace(folder / "report.html", content)


def compose(
    runs: Sequence[RunFolder], target: float | None, live: str = ""
) -> tuple[str, Sequence[tuple[Picture, str]]]:
    """The page, and its figures with their SVG documents; see `page` for `live`."""
    with needs_matplotlib():
        from fedge.report.figures import pictures
        from fedge.report.page import Goal, page
        from fedge.report.svg import render
    with _shown(runs):
        goal = Goal(default_target(runs), True) if target is None else Goal(target)
        drawn = [(picture, render(picture.figure)) for picture in pictures(runs, goal.target)]
        return page(runs, drawn, goal, live), drawn


def headline(runs: Sequence[RunFolder | Path | str], path: Path | str) -> Path:
    """One wide PNG for a README: accuracy (of regressions, loss) against rounds, and against MB, of all runs."""
    with needs_matplotlib():
        from fedge.report import figures
    found = [run if isinstance(run, RunFolder) else read(run) for run in runs]
    with _shown(found):
        image = _png(figures.headline(distinct(found)))
    return _replace(Path(path), image)


def partition_figure(counts: Sequence[Sequence[int]], names: Sequence[str] = (), total: int | None = None) -> Figure:
    """Heat map of a partition: counts [clients, classes], names of the classes or none."""
    with needs_matplotlib():
        from fedge.report import heatmap
    return heatmap.partition_figure(counts, names, total)


def devices_figure(flops: Sequence[float], up: Sequence[float], kinds: Sequence[str]) -> Figure:
    """A population of devices: computing against sending, one point per device."""
    with needs_matplotlib():
        from fedge.report import population
    return population.devices_figure(flops, up, kinds)


@contextmanager
def _shown(runs: Sequence[RunFolder]) -> Iterator[None]:
    """Files that can be read may still hold other things than a run writes, such as words where numbers should be."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "constrained_layout not applied")  # a number too long for any figure
            yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, ReportError):
            raise
        where = ", ".join(str(run.path) for run in runs[:3]) + (", ..." if len(runs) > 3 else "")
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ReportError(
            f"cannot show {where}: a file in it holds something that no run writes ({what}); run the experiment again"
        ) from error


@contextmanager
def needs_matplotlib() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        message = "fedge report needs matplotlib: pip install 'fedge[report]'"
        raise MissingExtra(message, name="matplotlib") from error


def _folder(runs: Sequence[RunFolder], out: Path | str | None) -> Path:
    if out is None:
        parents = [run.path.parent for run in runs]
        return runs[0].path if len(runs) == 1 else Path(os.path.commonpath(parents))
    if Path(out).suffix == ".html" or Path(out).is_file():
        raise ReportError(f"out is {out}, it must be a folder: report.html is written into it")
    return Path(out)


def _check_own(figures: Path) -> None:
    """The run may come from somebody else, and with it a link in the place of this folder."""
    try:
        atomic.refuse_link(figures)
    except OSError as error:
        raise ReportError(f"cannot write to {figures}: {error.strerror}, or choose another place") from error


def _png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=200)
    return stream.getvalue()


def _replace(path: Path, content: bytes) -> Path:
    """Write all or nothing: a reader sees the old file or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_atomically(path, content)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
    return path
