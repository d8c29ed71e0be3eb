"""`python -m benchmarks.kill_reproduce [KILLS [JOBS]]`: kill -9 of `fedge reproduce`, going on: is the table the same?

The paper's own files, with digits and a small network in the place of Fashion-MNIST, so that a run takes seconds.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILES = Path(__file__).parent / "paper"
SMALL = {
    'name = "fashion_mnist"': 'name = "digits"',
    'name = "fmnist_cnn"': 'name = "mlp"',
    "clients = 1000\n": "clients = 500\n",
    "cohort = 200\n": "cohort = 100\n",
    "[0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28]": "[0.05, 0.1, 0.15, 0.2]",
    "[0.02, 0.05, 0.1, 0.2]": "[0.1, 0.2]",
}
NAMES = ("tune", "noniid", "sharing")
ROUNDS = 12


def files(folder: Path) -> Path:
    """A copy of the experiments that is quick to run."""
    shutil.copytree(FILES, folder, ignore=shutil.ignore_patterns("results", "*.py", "__pycache__"))
    for path in folder.rglob("*.toml"):
        text = path.read_text()
        for old, new in SMALL.items():
            text = text.replace(old, new)
        path.write_text(text)
    return folder


def command(out: Path) -> list[str]:
    jobs = sys.argv[2] if len(sys.argv) > 2 else "1"
    options = ["--rounds", str(ROUNDS), "--seeds", "1", "--device", "cpu", "--jobs", jobs, "--out", str(out)]
    return [sys.executable, "-m", "fedge", "reproduce", *NAMES, *options]


def run(out: Path, environment: dict[str, str], kill_after: float | None = None) -> bool:
    """Whether it came to its end."""
    process = subprocess.Popen(command(out), env=environment, stdout=subprocess.DEVNULL)
    try:
        code = process.wait(kill_after)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    if code:
        sys.exit(f"fedge reproduce ended with {code}")
    return True


def content(out: Path) -> tuple[dict[str, str], list[dict[str, object]]]:
    """The tables without what is timed, and all lines of both stores without their times, in any order."""
    pages = {path.name: path.read_text().split("\n\n| cell |")[0] for path in sorted(out.glob("*.md"))}
    lines = [json.loads(line) for path in sorted(out.glob("*.jsonl")) for line in path.read_text().splitlines()]
    for line in lines:
        for name in ("seconds", "seconds_a_round", "at_a_time"):
            line.pop(name, None)
    return pages, sorted(lines, key=lambda line: str(line["key"]))


def main() -> None:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    folder, draw = Path(tempfile.mkdtemp()), random.Random()
    environment = os.environ | {"FEDGE_PAPER": str(files(folder / "paper"))}
    try:
        begin = time.perf_counter()
        run(folder / "whole", environment)
        whole = time.perf_counter() - begin
        hits = 0
        while hits < kills:
            after = draw.uniform(0.1, 0.8) * whole
            if run(folder / "killed", environment, after):
                sys.exit(f"it came to its end after {hits} of {kills} kills: try again")
            hits += 1
            begun = len(list((folder / "killed" / "runs").glob("*")))
            print(f"killed after {after:.1f} s, with {begun} runs begun and not finished")
        run(folder / "killed", environment)
        same = content(folder / "whole") == content(folder / "killed")
        pages, lines = content(folder / "whole")
        print(f"{hits} kills, {len(pages)} tables, {len(lines)} lines: {'the same' if same else 'DIFFERENT'}")
        sys.exit(0 if same else 1)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
