"""Ours against a hand-written JAX program in turns, on one CPU thread: workloads B and C.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.peers --jax /path/to/a/python/with/jax [B C]

Ours checks every upload, draws by address and keeps the ledger; the peer does none of it. Two processes, one of which
waits while the other works; medians of their CPU time, on which other work on the machine has little influence, are
compared and kept in jax.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedge.bench import WORKLOADS
from fedge.bench.timing import Round
from fedge.handle import parameters
from fedge.runs.folder import versions

HERE = Path(__file__).parent
FIGURES = HERE / "jax.json"
TURNS, SPAN = 11, 0.3  # turns of each side, and their seconds
ONE = {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}


def given(name: str) -> dict[str, Any]:
    """A workload as plain arrays; clients' examples padded to the longest list."""
    workload = WORKLOADS[name]
    algorithm, federation = workload.build(False)
    w1, b1, w2, b2 = (leaf.detach().numpy() for leaf in parameters(algorithm.model).values())
    sizes = federation.sizes.numpy()
    index = np.zeros((federation.clients, int(sizes.max())), np.int32)
    for client in range(federation.clients):
        mine = federation.examples(client).numpy()
        index[client, : len(mine)] = mine
    x = federation.data.train_x.flatten(1).numpy()
    data = {"x": x, "y": federation.data.train_y.numpy().astype(np.int32)}
    params = {"w1": w1.T, "b1": b1, "w2": w2.T, "b2": b2}
    settings = {"epochs": algorithm.epochs, "batch": algorithm.batch_size, "lr": algorithm.lr}
    return {**data, **params, **settings, "index": index, "sizes": sizes, "cohort": workload.cohort}


class Peer:
    """The JAX program as a process that does so many rounds whenever it is told to."""

    def __init__(self, python: str, name: str, folder: Path) -> None:
        file = folder / f"{name}.npz"
        np.savez(file, **given(name))
        command = [python, str(HERE / "jax_peer.py"), str(file)]
        if hasattr(os, "sched_setaffinity"):  # one core: JAX has threads that no setting removes
            command = ["taskset", "-c", str(max(os.sched_getaffinity(0))), *command]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **ONE})

    def __call__(self, rounds: int) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(rounds, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate()


def spent(ours: Round, rounds: int) -> float:
    """CPU seconds per round of this process."""
    with ours.working():
        begin = time.process_time()
        for _ in range(rounds):
            ours()
        return (time.process_time() - begin) / rounds


def compare(name: str, python: str, turns: int = TURNS, span: float = SPAN) -> dict[str, Any]:
    """Seconds per round of both sides, turn by turn."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        peer, ours = Peer(python, name, Path(folder)), Round(WORKLOADS[name], "cpu", compile=True)
        try:
            peer(3)
            for _ in range(30):
                ours()
            counts = [max(1, round(span / peer(10))), max(1, round(span / spent(ours, 10)))]
            pairs = [(spent(ours, counts[1]), peer(counts[0])) for _ in range(turns)]
        finally:
            peer.close()
    return {"workload": name, "seconds": [a for a, _ in pairs], "jax": [b for _, b in pairs]}


def row(one: dict[str, Any]) -> str:
    ours, theirs = (1e3 * statistics.median(one[key]) for key in ("seconds", "jax"))
    each = sorted(b / a for a, b in zip(one["seconds"], one["jax"], strict=True))
    return f"{one['workload']}: {ours:.2f} ms per round, JAX {theirs:.2f}: {theirs / ours:.2f} ({each[0]:.2f} to {each[-1]:.2f})"  # noqa: E501


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.peers", description=__doc__)
    parser.add_argument("--jax", required=True, help="a Python that has JAX")
    parser.add_argument("workloads", nargs="*", default=["B", "C"])
    chosen = parser.parse_args(args)
    said = subprocess.run([chosen.jax, "-c", "import jax; print(jax.__version__)"], capture_output=True, text=True)
    found = []
    for name in chosen.workloads:
        found.append(compare(name, chosen.jax))
        print(row(found[-1]), flush=True)
    about = {"versions": {**versions(), "jax": said.stdout.strip()}, "threads": 1}
    FIGURES.write_text(json.dumps({**about, "timings": found}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
