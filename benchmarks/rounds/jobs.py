"""Several rows at once on one device, each in a process of its own: one compiles while others train."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import measure
from .grid import Row

ROOT = Path(__file__).parents[2]
OUT_OF_TIME = 3  # exit code of a process that stopped before its work was done


@dataclass
class Jobs:
    """Work for so many processes at a time: rows, or single seeds of rows that need no tuning."""

    count: int
    options: list[str]  # of every process
    deadline: float
    say: Callable[[str], None] = print
    failed: list[str] = field(default_factory=list)
    late: bool = False

    def do(self, work: list[list[str]]) -> None:
        """Returns when all is done, has failed, or the time is over; `failed` names what went wrong."""
        left, lock = iter(work), threading.Lock()
        threads = [threading.Thread(target=self._take, args=(left, lock)) for _ in range(self.count)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()

    def _take(self, left: Iterator[list[str]], lock: threading.Lock) -> None:
        while True:
            with lock:
                one = next(left, None)
            if one is None or measure.now() > self.deadline:
                self.late = self.late or one is not None
                return
            self._one(one)

    def _one(self, work: list[str]) -> None:
        seconds = [] if self.deadline == float("inf") else ["--seconds", f"{self.deadline - measure.now():.1f}"]
        command = [sys.executable, "-m", "benchmarks.rounds", *work, *self.options, *seconds]
        last, pipe, joined = "", subprocess.PIPE, subprocess.STDOUT
        shared = environment(self.count)
        with subprocess.Popen(command, cwd=ROOT, env=shared, stdout=pipe, stderr=joined, text=True) as process:
            for line in process.stdout or ():
                last = line.strip() or last
                if line.startswith(("trial ", "run ", "try ")):
                    self.say(line.rstrip())
        code = process.returncode
        self.late = self.late or code == OUT_OF_TIME
        if code not in (0, OUT_OF_TIME):
            self.failed.append(" ".join(work))
            self.say(f"failed: {' '.join(work)}, exit code {code}: {last}")


def environment(count: int) -> dict[str, str]:
    """The cores, shared out among the processes."""
    cores = str(max(1, (os.cpu_count() or 1) // count))
    return {"OMP_NUM_THREADS": cores, "TORCHINDUCTOR_COMPILE_THREADS": cores, "PYTHONUNBUFFERED": "1", **os.environ}


def parts(rows: list[Row], seeds: list[int]) -> list[list[str]]:
    """The arguments of each process: a row with its tuning, or one seed of a row that takes another one's setting."""
    found = []
    for row in rows:
        found += [[row.name, "--seed", str(seed)] for seed in seeds] if row.problem.like else [[row.name]]
    return found
