"""Parts of an experiment that a Python file of the user's defines.

    [model]
    name = "mine.py:Net"     # the class Net of mine.py, which lies beside the experiment file

A name knows the file's place and its SHA-256, so a run never goes on with other code than it began with. The folder of
the runs has a copy of the file, for when it has changed since. Loading a part runs the file, as `python mine.py` would;
the copy is run within `copies_allowed` alone, and within `unread` nothing is run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from fedge.checks import nearest
from fedge.experiment.errors import ExperimentError
from fedge.runs import regular

log = logging.getLogger(__name__)

Table = dict[str, Any]
CODE = "code"  # the table of an experiment that says where the files are
_NAME = re.compile(r"(?P<file>[^:\n\0]+\.py):(?P<thing>[A-Za-z_]\w*)")
_MODULES: dict[tuple[str, str], tuple[ModuleType, bytes]] = {}  # by place and checksum, with what was run
_UNREAD: ContextVar[bool] = ContextVar("unread", default=False)
_COPIES: ContextVar[bool] = ContextVar("copies", default=False)


class Own(str):
    """`mine.py:Net` as the file has it, with the place and the checksum of mine.py."""

    path: str
    sha256: str
    folder: str = ""  # of the run or the runs whose table [code] names it
    unrecorded: bool = False  # it is named in a folder of runs that has no checksum of it
    copy_allowed: bool = False

    @property
    def copy(self) -> Path | None:
        """The copy that the folder of the runs has: beside the table that names the file, or one folder above."""
        if not self.folder:
            return None
        places = (Path(self.folder) / copy_name(self), Path(self.folder).parent / copy_name(self))
        return next((one for one in places if one.is_file() and _checksum(one.read_bytes()) == self.sha256), None)

    @property
    def came_with_the_run(self) -> bool:
        """Whether the file lies in the very folder that names it."""
        return bool(self.folder) and Path(self.path).is_relative_to(self.folder)

    @property
    def file(self) -> str:
        return self.rpartition(":")[0]

    @property
    def thing(self) -> str:
        return self.rpartition(":")[2]


class Unread:
    """Stands for a part whose file is not run: nothing is known of its fields."""


@contextmanager
def unread() -> Iterator[None]:
    """To look at an experiment without running anybody's code: fields of own parts are taken as they are."""
    with _set(_UNREAD):
        yield


@contextmanager
def copies_allowed() -> Iterator[None]:
    """Names that are read here may run the copy in the folder that names them, if the file itself has changed.

    Whoever can write to a folder can put another copy and its checksum there, so the user must have asked for it.
    """
    with _set(_COPIES):
        yield


@contextmanager
def _set(which: ContextVar[bool]) -> Iterator[None]:
    token = which.set(True)
    try:
        yield
    finally:
        which.reset(token)


def marked(tables: Mapping[str, Any], folder: Path | None = None, stored: bool = False) -> Table:
    """The tables with every name of an own part as `Own`.

    Files are found from the table [code], which the experiment in a run folder has, or else from `folder`. Of a
    `stored` experiment, one that a folder of runs has, a file without a checksum there is not run unasked.
    """
    code = tables.get(CODE, {})
    if not isinstance(code, Mapping):
        raise ExperimentError(f"{CODE} is {code!r}, expected a table: leave it out, fedge writes it by itself")
    base = Path.cwd() if folder is None else folder
    return {key: value if key == CODE else _marked(value, code, base, stored) for key, value in tables.items()}


def _marked(value: Any, code: Mapping[str, Any], folder: Path, stored: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _marked(one, code, folder, stored) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_marked(one, code, folder, stored) for one in value)
    if not isinstance(value, str) or isinstance(value, Own) or not (match := _NAME.fullmatch(value)):
        return value
    return _own(value, match["file"], code.get(match["file"], {}), folder, stored)


def _own(value: str, file: str, known: Any, folder: Path, stored: bool) -> Own:
    known = known if isinstance(known, Mapping) else {}
    found = Own(value)
    path = (folder / Path(str(known.get("path", file))).expanduser()).resolve()
    found.path, found.unrecorded = str(path), stored and "sha256" not in known
    found.sha256 = str(known["sha256"]) if "sha256" in known else _checksum(_content(value, path))
    if stored or "sha256" in known:
        found.folder, found.copy_allowed = str(folder.resolve()), _COPIES.get()
    return found


def copy_name(name: Own) -> str:
    """What the copy of its file is called: mine-1242dac124d0.py."""
    return f"{Path(name.path).stem}-{name.sha256[:12]}.py"


def copies(tables: Any) -> dict[str, bytes]:
    """The files that tables name, as the copies in the folder of the runs have them, by the copies' names."""
    return {copy_name(name): _content_of(name) for name in _names(tables)}


def code_of(tables: Any) -> Table:
    """The table [code] of tables with own parts: {"mine.py": {"path": ..., "sha256": ...}}."""
    return {name.file: {"path": name.path, "sha256": name.sha256} for name in _names(tables)}


def _names(tables: Any) -> Iterator[Own]:
    for value in tables.values() if isinstance(tables, Mapping) else tables:
        if isinstance(value, Own):
            yield value
        elif isinstance(value, Mapping | list | tuple):
            yield from _names(value)


def find(name: Own, where: str) -> Any:
    """The function or class that a name stands for; its file is run once per process."""
    if _UNREAD.get():
        return Unread
    module = _module(name, where)
    if not hasattr(module, name.thing):
        known = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
        hint = nearest(name.thing, known) or (f", it has {', '.join(known)}" if known else "")
        raise ExperimentError(f"{where}: there is no {name.thing!r} in {name.path}{hint}")
    found = getattr(module, name.thing)
    if not callable(found):
        raise ExperimentError(f"{where}: {name} is a {type(found).__name__}, expected a function or a class")
    return found


def _module(name: Own, where: str) -> ModuleType:
    """What was run once stays, whatever becomes of the file: these are the bytes that the name stands for."""
    key = (name.path, name.sha256)
    if key not in _MODULES:
        content = _verified(name, where)
        _MODULES[key] = _run(name, content, where), content
    return _MODULES[key][0]


def _content_of(name: Own) -> bytes:
    known = _MODULES.get((name.path, name.sha256))
    return _verified(name, name.file) if known is None else known[1]


def _verified(name: Own, where: str) -> bytes:
    """The bytes with the checksum on record: of the file, or of the copy where that is allowed."""
    path, copy = Path(name.path), name.copy
    content = path.read_bytes() if path.is_file() else None
    if content is not None and _checksum(content) == name.sha256:
        _check_not_brought(name, where)
        return content
    change = "is gone" if content is None else "has changed"
    if copy is not None and name.copy_allowed and _checksum(kept := copy.read_bytes()) == name.sha256:
        log.warning("%s %s since the run began: running the copy %s", path, change, copy)
        return kept
    hint = "" if copy is None else f"; {copy} is a copy, which `fedge run --resume --out DIR --run-code` goes on with"
    if content is None:
        raise ExperimentError(f"{where}: {_unreadable(name, path, 'there is no such file')}{hint}")
    raise ExperimentError(
        f"{where}: {path} has changed since it was first read: its SHA-256 was {name.sha256[:12]}..., now it "
        f"is {_checksum(content)[:12]}...; restore the file, or start another run{hint}"
    )


def _check_not_brought(name: Own, where: str) -> None:
    """Whoever made a folder of runs may have written a file in it, or named one without saying what is in it."""
    if name.copy_allowed or not (name.came_with_the_run or name.unrecorded):
        return
    lies = "lies in the folder of the run" if name.came_with_the_run else "has no checksum in the folder of the run"
    raise ExperimentError(
        f"{where}: {name.path} {lies}, and whoever made the folder may have written it: look at it, then "
        "`fedge run --resume --out DIR --run-code`"
    )


def _run(name: Own, content: bytes, where: str) -> ModuleType:
    """Run these very bytes as a module; what lies beside the file can be imported by it."""
    path = Path(name.path)
    spec = importlib.util.spec_from_loader(f"{path.stem}_{name.sha256[:12]}", loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[module.__name__] = module  # dataclasses look for it
    try:
        exec(compile(content, str(path), "exec"), vars(module))
    except Exception as error:
        del sys.modules[module.__name__]
        raise ExperimentError(f"{where}: {path} cannot be run: {said(error, str(path))}") from error
    return module


def said(error: Exception, path: str) -> str:
    """What went wrong, and in which line of the file."""
    trace, line = error.__traceback__, error.lineno if isinstance(error, SyntaxError) else None
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == path else line
        trace = trace.tb_next
    words = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" + ("" if line is None else f" (line {line})")


def _content(name: str, path: Path) -> bytes:
    try:
        return regular.content(path)
    except OSError as error:
        raise ExperimentError(_unreadable(name, path, error.strerror)) from None


def _unreadable(name: str, path: Path, why: str | None) -> str:
    return f"{name}: cannot read {path}: {why}; a file is named from the folder of the experiment file"


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def own_in(tables: Mapping[str, Any]) -> list[str]:
    """The files that tables name, for messages."""
    return [table["path"] for table in code_of(tables).values()]
