"""A program that stands in for Flower's `flwr-serverapp`, and starts it better.

Flower's SuperExec starts the server app as it finds it on the PATH, throws its output away, and puts the token of the
run on its command line, where everybody who is logged in can read it. The program written here keeps the output in a
file, passes the token in a file without a name, and lets the app end with its SuperExec, however that one ends.

    python -m fedge.deploy.standin FOLDER LOG
    PATH=FOLDER:$PATH flower-superexec ...
"""

from __future__ import annotations

import sys
from pathlib import Path

PROGRAM = "flwr-serverapp"

TEXT = """#!{python} -SE
import os, sys
words = sys.argv[1:]
if hasattr(os, "memfd_create") and "--token" in words:
    place = words.index("--token")
    token = os.memfd_create("token", 0)
    os.write(token, words[place + 1].encode())
    words[place:place + 2] = ["--token-file", f"/proc/self/fd/{{token}}"]
if sys.platform == "linux":
    import ctypes, signal
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: an app without its SuperExec can do nothing
log = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
os.dup2(log, 1)
os.dup2(log, 2)
os.execv({real!r}, [{real!r}, *words])
"""


def install(folder: Path, log: Path) -> Path:
    """Write the program, and return the folder to put on the PATH."""
    for one in (folder, log.parent):
        one.mkdir(parents=True, exist_ok=True, mode=0o700)
    program, real = folder / PROGRAM, Path(sys.executable).parent / PROGRAM
    program.write_text(TEXT.format(python=sys.executable, log=str(log), real=str(real)))
    program.chmod(0o700)
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m fedge.deploy.standin FOLDER LOG")
    install(*(Path(word).resolve() for word in sys.argv[1:]))
