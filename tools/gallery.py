"""Pictures of the examples: an example is run with its rounds kept, and its curves are drawn."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fedge
from fedge.experiment import compare, load
from fedge.report import headline
from fedge.runs.experiments import run_folders


def draw(example: str, picture: str) -> None:
    """Run an example, a program or an experiment file, and write its curves as a PNG."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        out = Path(folder)
        if example.endswith(".toml"):
            compare(load(example), out)
        else:
            run_kept(example, out)
        headline(run_folders(out), Path(picture))


def run_kept(example: str, out: Path) -> None:
    """Run a program in which every `fedge.train` also evaluates each round and keeps a run folder."""
    train, count = fedge.train, 0

    def kept(*given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        observe = replace(named.pop("observe", None) or fedge.Observe(), evaluate_every=1)
        return train(*given, **named, observe=observe, out=out / f"run-{count}")

    with patch.object(fedge, "train", kept):
        runpy.run_path(example, run_name="__main__")


if __name__ == "__main__":
    draw(sys.argv[1], sys.argv[2])
