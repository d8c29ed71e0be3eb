"""What the tests of deployments need: a quiet environment, and a look at what was left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
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
        "COLUMNS": "120",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # Flower's own programs
    }


def program(name: str) -> str:
    return str(Path(sys.executable).parent / name)


class Marked:
    """Runs programs whose processes, and those they start, can be found again; with a temporary folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.temporary = folder, folder / "temporary"
        self.temporary.mkdir()
        self.mark = f"FEDGE_TEST={uuid.uuid4().hex}"

    def env(self) -> dict[str, str]:
        name, _, value = self.mark.partition("=")
        return quiet(self.folder / "home") | {name: value, "TMPDIR": str(self.temporary)}

    def run(self, name: str, *words: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        command = [program(name), *words]
        return subprocess.run(
            command, cwd=self.folder, env=self.env(), capture_output=True, text=True, timeout=seconds, check=False
        )

    def start(self, name: str, *words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [program(name), *words], cwd=self.folder, env=self.env(), stdout=pipe, stderr=pipe, text=True
        )

    @staticmethod
    def until(process: subprocess.Popen[str], ready: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not ready():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end, f"not ready after {seconds} s"
            time.sleep(0.2)

    @staticmethod
    def wait_for(ready: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < end, f"not ready after {seconds} s"
            time.sleep(0.2)

    def assert_clean(self) -> None:
        """No process, and no temporary folder: that is where the keys were."""
        self.assert_no_process()
        assert not list(self.temporary.glob("fedge-fleet-*"))
        assert not list(self.folder.rglob("*.key"))

    def assert_no_process(self) -> None:
        end = time.monotonic() + 15  # apps notice within seconds that their parent is gone
        while left := running(self.mark):
            assert time.monotonic() < end, left
            time.sleep(0.5)


def running(words: str) -> dict[int, str]:
    """Processes whose environment has these words, and their command lines; those that are ending do not count."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if (
                folder.name.isdigit()
                and int(folder.name) != os.getpid()
                and words.encode() in (folder / "environ").read_bytes()
            ):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return {pid: command for pid, command in found.items() if command}
