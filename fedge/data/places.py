"""Where the files of a data set may lie: a path that was given, FEDGE_DATA, the user's cache, the system."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedge.data.errors import DataError

VARIABLE = "FEDGE_DATA"


def home() -> Path:
    """The folder for downloads and for what is computed once: FEDGE_DATA, or fedge's own folder in the user's cache."""
    if given := os.environ.get(VARIABLE):
        return _expanded(VARIABLE, given)
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "fedge"
    try:
        return Path.home() / ".cache" / "fedge"
    except RuntimeError:
        raise DataError(f"this user has no home folder: set {VARIABLE} to a folder for data sets") from None


def _expanded(name: str, path: Path | str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DataError(f"{name} is {path}, but there is no such home folder: name the folder in full") from None


def misnamed() -> str:
    """What is wrong with FEDGE_DATA, or with having none, if something is."""
    try:
        place = home()
    except DataError as error:
        return str(error)
    if not os.environ.get(VARIABLE):
        return ""
    if not os.path.isdir(place):
        fill = "" if os.path.lexists(place) else "fill it with `fedge data get NAME`, "
        return f"{VARIABLE} is {place}, which is no folder: {fill}name the folder with your copies, or unset it"
    if not os.access(place, os.R_OK | os.X_OK):
        return f"{VARIABLE} is {place}, which you may not read: name another folder with your copies, or unset it"
    return ""


@contextmanager
def looking() -> Iterator[None]:
    """Folders that this user may not look into are one line."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot look for data at {error.filename}: {error.strerror}; name another folder") from None


@looking()
def locate(name: str, path: Path | str | None, markers: Sequence[str], system: Sequence[str] = ()) -> Path:
    """The first of the marker files that there is; a path that was given is the only place that is looked at.

    A marker is a file that tells one form of the data set from another, such as `data_batch_1.bin`. The path may be
    the marker itself, the folder with it, or a folder with a sub-folder `name`.
    """
    given = None if path is None else _expanded("path", path)
    if given is not None and not given.exists():
        raise DataError(f"there is no {given}: give the file or folder of a local copy of {name}")
    if given is not None and given.is_file():
        return _the_file(name, given, markers)
    if given is None and (wrong := misnamed()):
        raise DataError(wrong)
    roots = [given] if given is not None else [home(), *map(Path, system)]
    for base in _bases(name, roots):
        for marker in markers:
            if (base / marker).is_file():
                return base / marker
    raise DataError(_missing(name, given, roots, markers))


def _the_file(name: str, given: Path, markers: Sequence[str]) -> Path:
    known = list(dict.fromkeys(Path(marker).name for marker in markers))
    if given.name in known:
        return given
    raise DataError(f"{given} is no file of {name}: expected {' or '.join(known)}, or a folder with one of them")


def _bases(name: str, roots: Sequence[Path]) -> Iterator[Path]:
    for root in roots:
        yield root / name
        yield root


def _missing(name: str, given: Path | None, roots: Sequence[Path], markers: Sequence[str]) -> str:
    looked = ", ".join(str(root) for root in roots)
    if given is not None:
        some = " or ".join(dict.fromkeys([markers[0], *markers[-2:]]))
        return f"{looked} has no files of {name}: expected its official files, such as {some}"
    return (
        f"{name} is not on this machine (looked in {looked}): download it with `fedge data get {name}`, "
        f"or name a local copy with {VARIABLE}=FOLDER or `fedge data get {name} --from PATH`"
    )
