"""The command line. It needs the extra `cli`; without it, one line says so."""

from __future__ import annotations

import sys

NEEDED = ("typer", "click", "rich")


def main() -> None:
    """The entry point `fedge`."""
    try:
        from fedge.cli.app import app
    except ImportError as error:
        if (error.name or "").split(".")[0] not in NEEDED:
            raise
        print(f"The command line needs {error.name}: pip install 'fedge[cli]'", file=sys.stderr)
        sys.exit(1)
    app(prog_name="fedge")
