"""`fedge data list|get|check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from fedge.cli.errors import FAILED, fail, one_line
from fedge.cli.text import say
from fedge.data import DataError
from fedge.data.catalogue import LOADERS, entry
from fedge.data.keep import get as get_data
from fedge.data.places import misnamed

INCLUDED = "part of the library"


def list_() -> None:
    """List the data sets, and where each is on this machine."""
    wide = max(map(len, LOADERS)) + 2
    for name, one in LOADERS.items():
        say(Console(), f"{name:{wide}}{one.about} ({one.licence})\n{'':{wide}}{_where(name)}")
    if wrong := misnamed():
        say(Console(), wrong)


def _where(name: str) -> str:
    find = entry(name).find
    if find is None:
        return INCLUDED
    try:
        return str(find(None))
    except DataError:
        return f"not here: fedge data get {name}"


def get(name: str, source: Path | None) -> None:
    """Download a data set from its official address, or copy it from a local copy."""
    console = Console()
    with one_line(), _Bar(console) as bar:
        _known(name)
        data, folder = get_data(name, source, bar)
    say(console, f"{name}: {data!r} in {folder}")


def check(names: list[str] | None, source: Path | None) -> None:
    """Read data sets completely and compare them with the official checksums."""
    with one_line():
        for name in names or []:
            _known(name)
        if source is not None and len(names or []) != 1:
            raise DataError("--from is for one data set: name it")
        if not names and (wrong := misnamed()):
            raise DataError(wrong)
    here = [name for name in LOADERS if not _where(name).startswith("not here")]
    bad = [name for name in names or here if not _is_good(name, source)]
    if bad:
        raise typer.Exit(FAILED)


def _is_good(name: str, source: Path | None) -> bool:
    one = entry(name)
    try:
        data = one.load() if one.find is None else one.load(source)
    except (ValueError, OSError, MemoryError) as error:
        fail(f"{name}: {str(error) or 'there is not enough memory'}", FAILED)
        return False
    place = INCLUDED if one.find is None else one.find(source)
    prepared = isinstance(place, Path) and place.suffix == ".npz"  # for these there is no official checksum
    said = "complete and consistent; only the clips could tell more" if prepared else "complete and as expected"
    Console().print(f"{name}: {data!r}, {place}: {said}", soft_wrap=True, markup=False, highlight=False)
    return True


def _known(name: str) -> None:
    try:
        entry(name)
    except ValueError as error:
        raise DataError(str(error)) from None


class _Bar:
    """rich's bar with the four words that pooch uses."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("downloading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bars = Bars(*columns, console=console, transient=True)
        self._task = self._bars.add_task("", total=None, visible=False)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self.total is not None:
            self._bars.stop()

    @property
    def total(self) -> Any:
        return self._bars.tasks[0].total

    @total.setter
    def total(self, size: int) -> None:
        self._bars.start()
        self._bars.update(self._task, total=size, visible=True)

    def update(self, size: int) -> None:
        self._bars.update(self._task, advance=size)

    def reset(self) -> None:
        """pooch calls this when a file is complete, then adds its size once more."""
        self._bars.reset(self._task)

    def close(self) -> None:
        self._bars.update(self._task, visible=False)
