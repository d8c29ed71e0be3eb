"""Programs in processes of their own that are not kept waiting for torch: copies of one process that has loaded it.

The words are those after `python`: a file, `-m module` or `-c code`, and arguments. What is loaded beforehand has
computed nothing, so a copy is as good as a new process; use `subprocess` where loading itself is what is tested.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.func", "fedge.cli.run", "fedge.sweep.whole", "tests.warm"])


def start(
    words: Sequence[str | Path],
    cwd: Path | str = ".",
    env: Mapping[str, str] | None = None,
    out: Path | str = os.devnull,
    err: Path | str = os.devnull,
) -> ForkServerProcess:
    """Start a program; its output goes to files."""
    where = [str(Path(one).resolve()) for one in (cwd, out, err)]
    given = (list(map(str, words)), dict(os.environ if env is None else env), *where)
    process = CONTEXT.Process(target=_become, args=given)
    process.start()
    return process


def run(
    words: Sequence[str | Path], cwd: Path | str = ".", env: Mapping[str, str] | None = None, timeout: float = 120
) -> CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` with text and all output does."""
    with TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = start(words, cwd, env, out, err)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"{words} took longer than {timeout} s: {err.read_text()}")
        return CompletedProcess(list(words), process.exitcode, out.read_text(), err.read_text())


def _become(words: list[str], env: dict[str, str], cwd: str, out: str, err: str) -> None:
    """What `python words` does, in this process."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for stream, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, stream)
    code = 0
    try:
        _execute(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _execute(words: list[str]) -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    first, *rest = words
    if first == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = words, str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")
