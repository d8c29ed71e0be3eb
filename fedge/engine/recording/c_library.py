"""C programs, compiled once and kept on disk: the same text on the same machine is never compiled twice."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

# Sums may be split over the lanes of a vector; infinities and NaN stay what they are.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-fwrapv")  # fmt: skip # noqa: E501
SECONDS = 60  # for a compiler


class NoCompiler(RuntimeError):
    """There is no C compiler, or it failed."""


@lru_cache(maxsize=1)
def compiler() -> tuple[str, str]:
    """The path of a C compiler and what it says of itself."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        raise NoCompiler(f"no C compiler ({', '.join(names)}) on this machine: install gcc, or leave compile out")
    return path, subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout


def there_is_a_compiler() -> bool:
    try:
        compiler()
    except NoCompiler:
        return False
    return True


def folder() -> Path:
    """Where compiled programs are kept: nobody else may write there, because they are run."""
    base = os.environ.get("XDG_CACHE_HOME")
    found = (Path(base) if base else Path.home() / ".cache") / "fedge" / "steps"
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


def load(text: str) -> tuple[Any, bool]:
    """The function `run` of a program, and whether it had to be compiled; a damaged file is compiled anew."""
    path, about = compiler()
    name = hashlib.sha256("\0".join([text, path, about, *FLAGS, _processor()]).encode()).hexdigest()[:32]
    try:
        library = folder() / f"{name}.so"
        if library.is_file():
            with suppress(OSError, AttributeError):
                return ctypes.CDLL(str(library)).run, False
            library.unlink()
        _compile(path, text, library)
        return ctypes.CDLL(str(library)).run, True
    except (OSError, AttributeError) as error:
        raise NoCompiler(f"compiled steps cannot be kept or loaded ({error}): set XDG_CACHE_HOME") from error


def _compile(path: str, text: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        source, made = Path(work) / "step.c", Path(work) / "step.so"
        source.write_text(text)
        command = [path, *FLAGS, "-shared", "-fPIC", "-o", str(made), str(source), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            raise NoCompiler(f"{path} failed: {said[0] if said else error}") from error
        os.replace(made, library)
