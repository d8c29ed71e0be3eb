"""How much faster than a plain loop over clients, on a CPU: ours and the loop in turns, medians.

    python -m benchmarks.loop

B is arithmetic too small for its operations' overhead, one thread for both sides. A is convolutions, two threads.
"""

from __future__ import annotations

import platform

import torch

from fedge.bench import WORKLOADS, measure

CASES = (("B", 1, 9), ("C", 1, 9), ("A", 2, 5))  # workload, threads, repeats


def main() -> None:
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}")
    for name, threads, repeats in CASES:
        timing = measure(WORKLOADS[name], "cpu", repeats, threads=(threads, threads))
        print(f"{name} ({WORKLOADS[name].title}), {threads} thread(s), {repeats} repeats in turns:")
        print(f"   {timing.median:.4f} s per round, {timing.ratio:.2f} times as fast as the loop")


if __name__ == "__main__":
    main()
