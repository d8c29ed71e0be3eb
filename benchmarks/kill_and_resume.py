"""Twenty kill -9 at random moments of a digits run, each followed by --resume: the end must equal the undisturbed run.

    python -m benchmarks.kill_and_resume [KILLS]

Compares rounds.jsonl (seconds aside), ledger.jsonl and every parameter, bit for bit.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from fedge.runs import checkpoint

SETTINGS = ["--set", "train.rounds=600", "--set", "train.checkpoint_every=7", "--no-report", "--quiet"]


def command(out: Path, resume: bool) -> list[str]:
    return [sys.executable, "-m", "fedge", "run", "--out", str(out), *(["--resume"] if resume else []), *SETTINGS]


def disturbed(out: Path, kills: int, rng: random.Random) -> int:
    """Start and kill until so many kills have hit a running process, then let it finish; returns how many hit."""
    hits = 0
    while True:
        process = subprocess.Popen(command(out, out.exists()))
        if hits == kills:
            assert process.wait() == 0
            return hits
        try:
            process.wait(timeout=rng.uniform(0.5, 9.0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            hits += process.wait() == -signal.SIGKILL
            print(f"kill {hits}: {rounds_done(out)} rounds on record", flush=True)
        else:
            assert process.returncode == 0, f"the run failed with exit code {process.returncode}"
            print(f"finished after {hits} kills", flush=True)
            return hits


def rounds_done(out: Path) -> dict[str, int]:
    return {path.parent.name: path.read_bytes().count(b"\n") for path in sorted(out.glob("*/rounds.jsonl"))}


def content(run: Path) -> tuple[list[dict[str, Any]], bytes, dict[str, Any]]:
    records = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    for record in records:
        del record["seconds"]
    return records, (run / "ledger.jsonl").read_bytes(), checkpoint.load(run / "checkpoint.pt")["state"]


def same(a: Any, b: Any) -> bool:
    """Equal nests, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def main() -> None:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    folder = Path(tempfile.mkdtemp())
    begin = time.perf_counter()
    try:
        subprocess.run(command(folder / "whole", resume=False), check=True)
        hits = disturbed(folder / "killed", kills, random.Random(0))
        for run in sorted((folder / "whole").glob("*/rounds.jsonl")):
            name = run.parent.name
            equal = same(content(folder / "whole" / name), content(folder / "killed" / name))
            print(f"{name}: {'equal, bit for bit' if equal else 'DIFFERENT'}")
            if not equal:
                sys.exit(1)
    finally:
        shutil.rmtree(folder)
    print(f"{hits} kills in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
