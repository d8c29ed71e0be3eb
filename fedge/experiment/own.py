"""Parts of an experiment that a Python file of the user's defines.

    [model]
    name = "mine.py:Net"     # the class Net of mine.py, which lies beside the experiment file

A name knows the file's place and its SHA-256, so a run never goes on with other code than it began with. Loading a part
runs the file, as `python mine.py` would; within `unread` nothing is run.
"""

from __future__ import annotations

import hashlib
import importlib.util
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

Table = dict[str, Any]
CODE = "code"  # the table of an experiment that says where the files are
_NAME = re.compile(r"(?P<file>[^:\n\0]+\.py):(?P<thing>[A-Za-z_]\w*)")
_MODULES: dict[tuple[str, str], ModuleType] = {}
_UNREAD: ContextVar[bool] = ContextVar("unread", default=False)


class Own(str):
    """`mine.py:Net` as the file has it, with the place and the checksum of mine.py."""

    path: str
    sha256: str

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
    token = _UNREAD.set(True)
    try:
        yield
    finally:
        _UNREAD.reset(token)


def marked(tables: Mapping[str, Any], folder: Path | None = None) -> Table:
    """The tables with every name of an own part as `Own`.

    Files are found from the table [code], which the experiment in a run folder has, or else from `folder`.
    """
    code = tables.get(CODE, {})
    if not isinstance(code, Mapping):
        raise ExperimentError(f"{CODE} is {code!r}, expected a table: leave it out, fedge writes it by itself")
    base = Path.cwd() if folder is None else folder
    return {key: value if key == CODE else _marked(value, code, base) for key, value in tables.items()}


def _marked(value: Any, code: Mapping[str, Any], folder: Path) -> Any:
    if isinstance(value, Mapping):
        return {key: _marked(one, code, folder) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_marked(one, code, folder) for one in value)
    if not isinstance(value, str) or isinstance(value, Own) or not (match := _NAME.fullmatch(value)):
        return value
    return _own(value, match["file"], code.get(match["file"], {}), folder)


def _own(value: str, file: str, known: Any, folder: Path) -> Own:
    known = known if isinstance(known, Mapping) else {}
    found = Own(value)
    path = (folder / Path(str(known.get("path", file))).expanduser()).resolve()
    found.path = str(path)
    found.sha256 = str(known["sha256"]) if "sha256" in known else _checksum(_content(value, path))
    return found


def code_of(tables: Any) -> Table:
    """The table [code] of tables with own parts: {"mine.py": {"path": ..., "sha256": ...}}."""
    found: Table = {}
    for value in tables.values() if isinstance(tables, Mapping) else tables:
        if isinstance(value, Own):
            found[value.file] = {"path": value.path, "sha256": value.sha256}
        elif isinstance(value, Mapping | list | tuple):
            found |= code_of(value)
    return found


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
    key = (name.path, name.sha256)
    content = _content(name, Path(name.path))
    if _checksum(content) != name.sha256:
        raise ExperimentError(
            f"{where}: {name.path} has changed since it was first read: its SHA-256 was {name.sha256[:12]}..., now it "
            f"is {_checksum(content)[:12]}...; restore the file, or start another run"
        )
    if key not in _MODULES:
        _MODULES[key] = _run(name, content, where)
    return _MODULES[key]


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
        return path.read_bytes()
    except OSError as error:
        raise ExperimentError(
            f"{name}: cannot read {path}: {error.strerror}; a file is named from the folder of the experiment file"
        ) from None


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def own_in(tables: Mapping[str, Any]) -> list[str]:
    """The files that tables name, for messages."""
    return [table["path"] for table in code_of(tables).values()]
