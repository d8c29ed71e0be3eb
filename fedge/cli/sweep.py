"""Sweeps on the command line: `fedge run` of a file with lists of values, and `fedge sweep show`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from fedge.cli.errors import FAILED, INTERRUPTED, fail, one_line, told
from fedge.cli.interrupt import Interrupt
from fedge.cli.listener import Say
from fedge.cli.narrow import show as show_table
from fedge.cli.progress import Display
from fedge.cli.results import note
from fedge.cli.text import printable, say, to_json
from fedge.experiment import Plan
from fedge.experiment.planning import stored_sweep
from fedge.report import ReportError, default_target, grouped, read_all, tidy
from fedge.report.groups import Group
from fedge.report.series import has_no_accuracy, is_number, telling_metrics
from fedge.report.summary import columns, summary_rows
from fedge.runs.experiments import EXPERIMENT_FILE, is_tried
from fedge.sweep import Runner, Stopped
from fedge.sweep.kept import Kept, State, begin, check_first, kept_runs, missing, state
from fedge.sweep.processes import LostWorker, Unit
from fedge.sweep.runner import locked
from fedge.sweep.store import Line
from fedge.sweep.whole import work

NOTHING = "–"
ON_DEVICES = {"seconds on the devices": "device\ns", "joules": "energy\nJ"}
SHOWN = ("final test", "best test", "MB in total", "seconds on the devices", "joules", "rounds to", "MB to")


def run_sweep(job: Plan, console: Console, jobs: int, tools: Sequence[str] = ()) -> int:
    """All runs that are not done, several at a time, followed by these tools; returns the exit code."""
    runs = kept_runs(job.sweep, tools)
    runner = Runner(job.folder)
    check_first(runner, job.sweep)
    with locked(job.folder):
        begin(job.folder, job.sweep)
        wanted = missing(job.folder, runs)
        done = len(runs) - len(wanted)
        count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
        say(console, f"{job.sweep.name} in {job.folder}: {count}{f', {done} done before' if done else ''}")
        return _work(runner, wanted, min(jobs, len(wanted)), console, _again(job, jobs, tools))


def _again(job: Plan, jobs: int, tools: Sequence[str]) -> str:
    more = [*(["--jobs", str(jobs)] if jobs > 1 else []), *(f"--track={tool}" for tool in tools)]
    code = ["--run-code"] if job.run_code else []
    return shlex.join(["fedge", "run", "--resume", "--out", str(job.folder), *more, *code])


def _work(runner: Runner, wanted: Sequence[Kept], jobs: int, console: Console, again: str) -> int:
    failed = 0

    def done(run: Unit, line: Line | None) -> None:
        nonlocal failed
        failed += bool(line and line["failed"])
        said.done(run, line)

    with Interrupt(Display().stopping) as interrupt, console.status("starting") as status:
        runner.listener = said = Say(console, status)
        said.several(len(wanted), jobs)
        runner.stop = interrupt.wanted
        try:
            work(runner, wanted, jobs, done)
        except (Stopped, KeyboardInterrupt):
            typer.echo(f"Stopped. Go on with:\n  {again}", err=True)
            return INTERRUPTED
        except (LostWorker, MemoryError) as error:
            fail(f"{told(error)}; go on with: {again}", FAILED)
            return FAILED
    return FAILED if failed else 0


def sweep_result(job: Plan, console: Console) -> dict[str, Any]:
    """Print the table; the same as an object for programs."""
    runs = kept_runs(job.sweep)
    states = {run.title: state(job.folder, run) for run in runs}
    goal = _print_table(job.folder, runs, job.sweep.first.target, console)
    for line in _failures(states):
        fail(line, FAILED)
    folders = [job.folder / run.folder for run in runs if is_tried(job.folder / run.folder)]
    found = tidy(folders, goal) if folders else []
    return {"name": job.sweep.name, "folder": str(job.folder), "target": goal, "runs": found}


def _failures(states: dict[str, State]) -> Iterator[str]:
    """A reason once, with all runs that it ended."""
    titles: dict[str, list[str]] = {}
    for title, one in states.items():
        if one.word == "failed":
            titles.setdefault(one.why, []).append(title)
    return (f"{', '.join(several)} failed: {why}" for why, several in titles.items())


def _print_table(folder: Path, runs: Sequence[Kept], target: float | None, console: Console) -> float | None:
    """Means and spreads over seeds, of all runs that have a round or failed; returns the target."""
    folders = [folder / run.folder for run in runs if is_tried(folder / run.folder)]
    read = [run for run in read_all(folders) if run.rounds or run.failed] if folders else []
    if not read:
        return target
    goal = default_target(read) if target is None or has_no_accuracy(read) else target
    groups, metrics = grouped(read), telling_metrics(read)
    chosen = [one for one in columns(goal, metrics) if _is_shown(one.title)]
    head, rows = summary_rows(groups, chosen)
    few = all(run.finished or run.failed for run in read) and len(head) > head.index("rounds") + 1
    kept = [at for at, title in enumerate(head) if title != "rounds" or not few]
    head = [_title(head[at]) for at in kept]
    cells = [[_cell(row[at], at) for at in kept] for row in rows]
    marked = next(at for at, title in enumerate(head) if title not in ("algorithm", "runs"))
    for row, group in zip(cells, groups, strict=True):
        row[marked] = _marked(row[marked], group)
    console.print()
    show_table(console, head, cells, metrics, f"in the report and in fedge.results({str(folder)!r})")
    whole = [run.summary | {"failed": not is_number(run.summary.get("final_rounds"))} for run in read]
    if final := note(whole, goal if target is None else None):
        say(console, f"{final}{'; best: the best round' if any(title.startswith('best') for title in head) else ''}")
    if goal is not None and not any(title.startswith("rounds\n") for title in head):
        say(console, f"no run reached {100 * goal:.3g} %, the target")
    if any(group.seeds > 1 for group in groups):
        say(console, "mean ± standard deviation over the runs of a row, which differ in their seeds")
    console.print()
    return goal


def _marked(text: str, group: Group) -> str:
    """`failed`, or beside the mean over the other seeds how many did."""
    failed = sum(bool(run.failed) for run in group.runs)
    if not failed:
        return text
    return "failed" if failed == group.seeds else f"{text.splitlines()[0]}\n({failed} failed)"


def _is_shown(title: str) -> bool:
    """Of what the devices spent the sum alone: the report has it to the target too."""
    return title.startswith(SHOWN) and not (title.startswith(tuple(ON_DEVICES)) and " to " in title)


def _title(title: str) -> str:
    """In two lines, so that columns are narrow."""
    title = ON_DEVICES.get(title, title)
    for long, short in ((" test accuracy (%)", "\nacc %"), (" to ", "\nto "), (" in total", ""), (" test ", "\n")):
        title = title.replace(long, short)
    return title


def _cell(text: str | None, at: int) -> str:
    shown = NOTHING if text is None else text
    return shown.replace(" ± ", "±").replace(" (", "\n(") if at else shown


def show(folder: Path, json: bool) -> None:
    """List the runs of a sweep, which are done and which failed, and the results so far."""
    console = Console(stderr=json)
    with one_line():
        stored = folder / EXPERIMENT_FILE
        if not stored.is_file():
            raise ReportError(f"{folder} holds no {EXPERIMENT_FILE}: name a folder that `fedge run` made")
        sweep = stored_sweep(folder)
        runs = kept_runs(sweep)
        states = [state(folder, run) for run in runs]
        if json:
            found = [
                {
                    "run": run.title,
                    "folder": str(folder / run.folder),
                    "state": one.word,
                    "rounds": one.rounds,
                    "failed": one.why or None,
                }
                for run, one in zip(runs, states, strict=True)
            ]
            typer.echo(to_json({"name": sweep.name, "runs": found}))
            return
        for run, one in zip(runs, states, strict=True):
            say(console, _line(run, one))
        words = [one.word for one in states]
        counts = [f"{words.count(word)} {word}" for word in ("done", "failed", "begun", "to do") if word in words]
        say(console, f"{len(runs)} runs: {', '.join(counts)}")
        _print_table(folder, runs, sweep.first.target, console)


def _line(run: Kept, now: State) -> str:
    far = f"round {now.rounds} of {run.rounds}"
    after = {"done": "", "to do": "", "begun": f", {far}", "failed": f", {far}: {printable(now.why)}"}[now.word]
    return f"{now.word:6} {printable(run.title)}{after}"
