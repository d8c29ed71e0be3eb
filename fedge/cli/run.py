"""`fedge run`."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from fedge.checks import choice
from fedge.cli.board import Boards
from fedge.cli.errors import FAILED, INTERRUPTED, fail, one_line
from fedge.cli.progress import Display, Lines, Live
from fedge.cli.results import failures, note, print_table, rows, with_rounds
from fedge.cli.sweep import run_sweep, sweep_result
from fedge.cli.text import listen, say, to_json
from fedge.cli.torchrun import program, stopping
from fedge.engine.ranks.process_group import Group, RankLost, joined
from fedge.experiment import ExperimentError, Outcome, Plan, Watch, build, compare, plan
from fedge.report import MissingExtra, ReportError, headline, read_all, write_report
from fedge.report.series import has_no_accuracy
from fedge.report.trackers import PACKAGES, missing


def run(
    experiment: Path | None,
    settings: list[str] | None,
    out: Path | None,
    resume: bool,
    device: str | None,
    quiet: bool,
    verbose: bool,
    json: bool,
    tensorboard: bool,
    track: list[str] | None,
    report: bool,
    jobs: int,
    rank_timeout: float,
    run_code: bool,
) -> None:
    """Train every algorithm of an experiment and compare them."""
    chosen = [*(settings or []), *([] if device is None else [f"train.device={device}"])]
    with one_line(), joined(rank_timeout) as group, one_line(group):
        console = Console(stderr=json, quiet=quiet or not group.leads)
        if not group.leads:
            logging.getLogger("fedge").setLevel(logging.ERROR)
        elif verbose:
            listen()
        tools = _tools(tensorboard, track or [])
        job = group.first(lambda: plan(experiment, chosen, out, resume, run_code=run_code))
        if job.sweep.swept or jobs > 1:
            raise _sweep(job, console, group, jobs, report, tools, json)
        again = _command(job, tools, report, quiet, json)
        outcomes = _train(job, console, tools, again, group)
        found: dict[str, Any] = {}
        if group.leads:
            found = finish(job, outcomes, console, report, "tensorboard" in tools)
            if json:
                typer.echo(to_json(found))
        if code := FAILED if _lost(found) or any(outcome.failed for outcome in outcomes) else 0:
            raise _leave(group, typer.Exit(code))
        _leave(group, typer.Exit(0))


def _sweep(
    job: Plan, console: Console, group: Group, jobs: int, report: bool, tools: Sequence[str], json: bool
) -> typer.Exit:
    """Many runs, each in a folder of its own."""
    if group.size > 1:
        raise ExperimentError(f"{job.sweep.name} is a sweep: use --jobs N without torchrun, or one run of it at a time")
    code = run_sweep(job, console, jobs, tools)
    if code == INTERRUPTED:
        return typer.Exit(code)
    found = sweep_result(job, console)
    folders = [Path(one["folder"]) for one in found["runs"] if one["rounds"]]
    found |= _report(folders, job.folder, found["target"], console) if report else {}
    if json:
        typer.echo(to_json(found))
    return typer.Exit(FAILED if _lost(found) else code)


def _lost(found: Mapping[str, Any]) -> bool:
    """Whether a report was to be written and could not be."""
    return found.get("report", "") is None


def _tools(tensorboard: bool, track: Sequence[str]) -> tuple[str, ...]:
    """The tools that follow the runs; one that is not known or not installed is said before anything is trained."""
    found = tuple(dict.fromkeys([*(["tensorboard"] if tensorboard else []), *track]))
    for tool in found:
        try:
            choice("--track", tool, PACKAGES)
        except ValueError as error:
            raise ExperimentError(str(error)) from None
        if find_spec(tool) is None:
            asked = f"--{tool}" if tensorboard and tool == "tensorboard" else f"--track {tool}"
            raise missing(tool, asked)
    return found


def _train(job: Plan, console: Console, tools: Sequence[str], again: str, group: Group) -> list[Outcome]:
    with group.together():
        setup = build(job.experiment)
    say(console, f"{'Going on with' if job.resume else 'Running'} {job.experiment.name} in {job.folder}")
    try:
        with display(job, console) as shown, stopping(group, shown) as interrupt:
            watch: Watch = Boards(shown, job.folder, job.experiment, tools) if tools and group.leads else shown
            outcomes = compare(
                job.experiment,
                job.folder,
                resume=job.resume,
                watch=watch,
                stop=interrupt.wanted,
                setup=setup,
                group=group,
            )
    except KeyboardInterrupt:
        raise stopped("Ended at once. The last checkpoints are", job, again, group) from None
    except RankLost as error:
        told = f"{error}; the checkpoints are in {job.folder}, go on with: {again}"
        raise fail(told, FAILED, group) from None
    if len(outcomes) < len(job.experiment.labels) or any(one.run is not None and one.run.stopped for one in outcomes):
        raise _leave(group, stopped("Stopped. The checkpoints are", job, again, group))
    return outcomes


def _leave(group: Group, end: typer.Exit) -> typer.Exit:
    """Wait for the other ranks, then end at once: torch's threads may abort a process during a normal shutdown."""
    group.meet()
    if group.size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.exit_code)
    return end


def display(job: Plan, console: Console) -> Display:
    if console.quiet:
        return Display()
    return Live(console, job.experiment.labels) if console.is_terminal else Lines(console)


def stopped(what: str, job: Plan, again: str, group: Group | None = None) -> typer.Exit:
    if group is None or group.leads:
        typer.echo(f"{what} in {job.folder}. Go on with:\n  {again}", err=True)
    return typer.Exit(INTERRUPTED)


def _command(job: Plan, tools: Sequence[str], report: bool, quiet: bool, json: bool) -> str:
    """What a person types to go on; the rest is in the folder."""
    flags = {"--tensorboard": "tensorboard" in tools}
    flags |= {f"--track={tool}": True for tool in tools if tool != "tensorboard"}
    flags |= {"--no-report": not report, "--quiet": quiet, "--json": json, "--run-code": job.run_code}
    words = ["run", "--resume", "--out", str(job.folder), *(flag for flag, on in flags.items() if on)]
    return f"{program()} {shlex.join(words)}"


def finish(job: Plan, outcomes: Sequence[Outcome], console: Console, report: bool, tensorboard: bool) -> dict[str, Any]:
    found, goal = rows(outcomes, job.experiment.target)
    console.print()
    print_table(console, found, goal, job.folder)
    chosen = job.experiment.target if goal == job.experiment.target else None
    console.print(f"{note(found, goal if chosen is None else None)}\n")
    for line in failures(found):
        fail(line, FAILED)
    written = _report(with_rounds(outcomes), job.folder, chosen, console) if report else {}
    if tensorboard:
        say(console, f"TensorBoard  tensorboard --logdir {shlex.quote(str(job.folder))}")
    return {"name": job.experiment.name, "folder": str(job.folder), "target": goal, **written, "runs": found}


def _report(runs: Sequence[Path], folder: Path, target: float | None, console: Console) -> dict[str, str | None]:
    if not runs:
        say(console, "No report was written: no algorithm has a round")
        return {}
    try:
        page = write_report(runs, folder, target)
        picture = headline(runs, folder / f"{'loss' if has_no_accuracy(read_all(runs)) else 'accuracy'}.png")
    except MissingExtra as error:
        say(console, f"No report was written: {error}")
        return {}
    except (ReportError, OSError) as error:
        fail(
            f"no report was written: {error}. The runs are done: go on with fedge report {shlex.quote(str(folder))}",
            FAILED,
        )
        return {"report": None}
    say(console, f"Report   {page}")
    say(console, f"Picture  {picture}")
    return {"report": str(page), "picture": str(picture)}
