"""Getting a data set onto this machine: downloaded, or copied from a local copy, and checked either way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from fedge import atomic, regular
from fedge.data.base import Data
from fedge.data.catalogue import Entry, entry
from fedge.data.download import download
from fedge.data.errors import DataError
from fedge.data.places import home
from fedge.data.speech_commands import PREPARED


def get(name: str, source: Path | None = None, progress: Any = None) -> tuple[Data, Path]:
    """Put the official files into fedge's folder and load them; returns the data and the place."""
    one = entry(name)
    if one.find is None:
        raise DataError(f"{name} is part of the library: there is nothing to get")
    folder = home() / name
    if source is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot write to {folder}: {error.strerror}; set FEDGE_DATA to another folder") from error
        download(one.remotes, folder, progress)
        return one.load(folder), folder
    data = one.load(source)  # refused here, before anything is copied
    _copy(one, one.find(source), folder)
    return data, folder


def _copy(one: Entry, place: Path, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in one.files(place):
            target = folder / (PREPARED if path.suffix == ".npz" else path.name)
            if path.resolve() != target.resolve():
                with open(path, "rb", opener=regular.handle) as source, atomic.replaced(target) as file:
                    shutil.copyfileobj(source, file)
                other = target.with_suffix("") if target.suffix == ".gz" else target.with_name(f"{target.name}.gz")
                other.unlink(missing_ok=True)  # the same file in another form would hide this one
    except OSError as error:
        raise DataError(f"cannot copy to {folder}: {error.strerror or error}; set FEDGE_DATA to another") from error
