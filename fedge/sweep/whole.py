"""A whole sweep from Python, as `fedge run` does it on the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedge.checks import at_least_one
from fedge.experiment.planning import load_sweep
from fedge.report import tidy
from fedge.runs.experiments import is_run
from fedge.sweep.kept import Kept, begin, check_first, kept_runs, missing, run_all
from fedge.sweep.processes import Unit, run_in_processes
from fedge.sweep.runner import Runner, locked
from fedge.sweep.store import Line


def run_sweep(
    file: Path | str, out: Path | str, *, settings: Sequence[str] = (), jobs: int = 1, tools: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Train all runs of an experiment file that are not done yet into `out`, and return the rows of `fedge.results`.

    Rows are in the order of the file.

    `settings` are those of `--set`, `jobs` how many runs go on at a time, `tools` what follows them ("mlflow"). A run
    that fails has its reason in the table. In a script, `jobs` above 1 needs `if __name__ == "__main__":`.
    """
    at_least_one("jobs", jobs)
    sweep, folder = load_sweep(file, settings), Path(out)
    runs = kept_runs(sweep, tools)
    with locked(folder):
        runner = Runner(folder)
        check_first(runner, sweep)
        begin(folder, sweep)
        work(runner, missing(folder, runs), jobs)
    begun = [folder / run.folder for run in runs if is_run(folder / run.folder)]
    return tidy(begun, sweep.first.target) if begun else []


def work(
    runner: Runner, runs: Sequence[Kept], jobs: int, done: Callable[[Unit, Line | None], None] = lambda run, line: None
) -> None:
    """These runs, at most so many at a time; `done` is told of each."""
    if min(jobs, len(runs)) > 1:
        run_in_processes(runner, runs, min(jobs, len(runs)), done)
    else:
        run_all(runner, runs, done)
