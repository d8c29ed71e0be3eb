"""`python -m benchmarks.theory [convex|constants|newton|nonconvex|bytes]`: measure, draw, write docs/theory.md.

`--page` writes the page alone.
"""

from __future__ import annotations

import sys
import time

import torch

from . import bytes, constants, convex, newton, nonconvex, page

PARTS = {
    "convex": convex.main,
    "constants": constants.main,
    "newton": newton.main,
    "nonconvex": nonconvex.main,
    "bytes": bytes.main,
}


def main(arguments: list[str]) -> None:
    names = [] if arguments == ["--page"] else arguments or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        sys.exit(f"unknown part {unknown[0]!r}: choose from {', '.join(PARTS)}, or give --page alone")
    torch.set_num_threads(1)
    for name in names:
        begin = time.perf_counter()
        PARTS[name]()
        print(f"{name}: {time.perf_counter() - begin:.0f} s")
    page.write()


if __name__ == "__main__":
    main(sys.argv[1:])
