"""What the tests of deployments need: a quiet environment, and a look at what was left behind."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def quiet(home: Path) -> dict[str, str]:
    """Flower offline, in a home of its own; the repository on the path of every process."""
    return os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


def running(words: str) -> dict[int, str]:
    """Processes whose command line or environment names these words, this one and its parents left out."""
    mine, found = set(), {}
    pid = os.getpid()
    while pid > 1:
        mine.add(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) not in mine:
            try:
                if (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    continue
                command = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            except OSError:
                continue
            if words.encode() in command:
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found
