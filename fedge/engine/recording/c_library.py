"""C programs, compiled once and kept on disk: the same text on the same machine is never compiled twice.

Beside each is its SHA-256. One that was cut short or changed, as by a loss of power, would end the process without a
word once it is loaded, or compute other numbers: it is compiled anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedge.once import is_new

# Sums may be split over the lanes of a vector; infinities and NaN stay what they are.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-fwrapv")  # fmt: skip # noqa: E501
SECONDS = 60  # for a compiler

log = logging.getLogger("fedge")


class NoCompiler(RuntimeError):
    """There is no C compiler, or it failed."""


@lru_cache(maxsize=1)
def compiler() -> tuple[tuple[str, ...], str]:
    """The command of a C compiler that runs here, such as ("ccache", "gcc"), and what it says of itself."""
    named = os.environ.get("CC", "").strip()
    names = [named] if named else ["cc", "gcc", "clang"]
    broken: list[str] = []
    for command in filter(None, map(_command, names)):
        try:
            return command, _version(command)
        except (OSError, subprocess.SubprocessError) as error:
            broken.append(f"{' '.join(command)} ({error})")
    if broken:
        raise NoCompiler(f"the C compiler {', '.join(broken)} cannot run: repair it, set CC, or leave compile out")
    raise NoCompiler(
        f"there is no C compiler ({', '.join(names)}) on this machine: install gcc, set CC, or leave compile out"
    )


def _command(name: str) -> tuple[str, ...] | None:
    """A program, or one with arguments as in CC="ccache gcc"; None where there is no such program."""
    if path := shutil.which(name):
        return (path,)
    with suppress(ValueError):  # a quotation mark without its second
        first, *rest = shlex.split(name)
        return (path, *rest) if (path := shutil.which(first)) else None
    return None


def _version(command: tuple[str, ...]) -> str:
    asked = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, errors="replace", check=True, timeout=SECONDS
    )
    return asked.stdout


def check() -> None:
    """Raise NoCompiler where programs cannot be compiled or have no place to be kept."""
    compiler()
    place()


def there_is_a_compiler() -> bool:
    try:
        check()
    except NoCompiler:
        return False
    return True


def place() -> Path:
    """The folder of compiled programs, which need not be there yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "fedge" / "steps"
    except RuntimeError as error:  # this user has no home
        raise NoCompiler(
            f"compiled steps cannot be kept ({error}): set XDG_CACHE_HOME or HOME, or leave compile out"
        ) from error


def folder() -> Path:
    """Where compiled programs are kept: nobody else may write there, because they are run."""
    found = place()
    found.mkdir(parents=True, exist_ok=True, mode=0o700)
    about = found.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise NoCompiler(f"{found} can be written by others: chmod 700 it, or leave compile out")
    return found


def _processor() -> str:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")


@lru_cache(maxsize=1)
def vector_bytes() -> int:
    """Bytes of the widest vectors that this processor computes with."""
    about = _processor()
    return 64 if "avx512f" in about else 32 if "avx2" in about else 16


def load(text: str) -> tuple[Any, bool]:
    """The function `run` of a program, and whether it had to be compiled; a damaged file is compiled anew."""
    command, about = compiler()
    try:
        name = hashlib.sha256("\0".join([text, *command, about, *FLAGS, _processor()]).encode()).hexdigest()[:32]
        library = folder() / f"{name}.so"
        if _is_whole(library):
            with suppress(OSError, AttributeError):
                return ctypes.CDLL(str(library)).run, False
        _compile(command, text, library)
        return ctypes.CDLL(str(library)).run, True
    except (OSError, AttributeError) as error:
        raise NoCompiler(f"compiled steps cannot be kept or loaded ({error}): set XDG_CACHE_HOME") from error


def is_made(make: Callable[[], Any], what: str) -> bool:
    """Whether a program can be made; why not is said once in the log."""
    try:
        make()
    except NoCompiler as reason:
        if is_new(told := f"{what} are computed by torch's operations: {reason}"):
            log.info(told)
        return False
    return True


def _is_whole(library: Path) -> bool:
    """Whether a program is as it was compiled."""
    try:
        return _sum(library).read_text() == hashlib.sha256(library.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False


def _sum(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _compile(command: tuple[str, ...], text: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        source, made = Path(work) / "step.c", Path(work) / "step.so"
        source.write_text(text)
        whole = [*command, *FLAGS, "-shared", "-fPIC", "-o", str(made), str(source), "-lm"]
        try:
            subprocess.run(whole, check=True, capture_output=True, text=True, errors="replace", timeout=SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            raise NoCompiler(f"{' '.join(command)} failed: {said[0] if said else error}") from error
        checksum = Path(work) / "step.sha256"
        checksum.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
        os.replace(made, library)
        os.replace(checksum, _sum(library))
