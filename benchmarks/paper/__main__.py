"""`python -m benchmarks.paper`: docs/results.md and its figures, from the results that are stored."""

from __future__ import annotations

import sys

from . import page


def main(arguments: list[str]) -> None:
    if arguments:
        sys.exit(f"unknown arguments {' '.join(arguments)}: give none; runs are made by `fedge reproduce`")
    page.write()


if __name__ == "__main__":
    main(sys.argv[1:])
