"""`fedge deploy`: the same experiment on a real fleet, over Flower."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from fedge.cli.errors import ASKED, FAILED, fail, one_line
from fedge.cli.interrupt import Interrupt
from fedge.cli.run import display, finish, stopped
from fedge.cli.text import say, to_json
from fedge.experiment import Outcome, Plan, build
from fedge.report import MissingExtra

if TYPE_CHECKING:
    from fedge.deploy.local import Options

NEEDED = ("flwr", "cryptography", "httpx")


@contextmanager
def _deploying() -> Iterator[None]:
    """What can go wrong with a fleet, in one line; without the extra, which one it is."""
    with one_line():
        try:
            yield
        except ImportError as error:
            name = (error.name or "").split(".")[0]
            if isinstance(error, MissingExtra) or name not in NEEDED:
                raise
            raise MissingExtra(f"fedge deploy needs {name}: pip install 'fedge[flower]'", name=name) from None
        except (RuntimeError, ValueError) as error:
            if not type(error).__module__.startswith("fedge.deploy"):
                raise
            raise fail(str(error), FAILED) from None


def local(
    experiment: Path | None,
    nodes: int | None,
    settings: list[str] | None,
    out: Path | None,
    resume: bool,
    deadline: float,
    min_replies: int,
    quiet: bool,
    json: bool,
    report: bool,
) -> None:
    """Start a fleet on this machine, run an experiment on it, and stop it."""
    console = Console(stderr=json, quiet=quiet)
    with _deploying(), _ended_by_signal():
        from fedge.deploy.local import Options, plan_local

        job = plan_local(experiment, settings or [], out, resume, nodes)
        options = Options(deadline, min_replies, say=lambda line: say(console, line))
        outcomes = _follow(job, console, options, nodes)
        found = finish(job, outcomes, console, report, False)
    if json:
        typer.echo(to_json(found))
    if any(outcome.failed for outcome in outcomes):
        raise typer.Exit(FAILED)


def _follow(job: Plan, console: Console, options: Options, nodes: int | None) -> list[Outcome]:
    from fedge.deploy.local import check_nodes, mean_phase, run_local
    from fedge.deploy.replies import check_replies

    setup = build(job.experiment)
    check_nodes(nodes, setup)
    check_replies(options.min_replies, setup)
    again = shlex.join(["fedge", "deploy", "local", "--resume", "--out", str(job.folder)])
    options.say(
        f"{'Going on with' if job.resume else 'Running'} {job.experiment.name} in {job.folder}, on "
        f"{setup.federation.clients} nodes"
    )
    try:
        with display(job, console) as shown, Interrupt(shown.stopping) as interrupt:
            outcomes, news = run_local(job, setup, shown, interrupt.wanted, options)
    except KeyboardInterrupt:
        raise stopped("Ended at once, and so was the fleet. The last checkpoints are", job, again) from None
    if len(outcomes) < len(job.experiment.labels) or any(one.run is not None and one.run.stopped for one in outcomes):
        raise stopped("Stopped, and so is the fleet. The checkpoints are", job, again)
    if line := mean_phase(news.timings):
        options.say(line)
    return outcomes


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """SIGTERM and a closed terminal end this as an error would: the fleet is stopped and its keys are removed.

    Once: a second signal is ignored, because it would interrupt the stopping.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP)

    def end(number: int, frame: FrameType | None) -> None:
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def keys(folder: Path, host: list[str], nodes: int, days: int) -> None:
    """Make a CA, the SuperLink's certificate and one key per node."""
    with _deploying():
        from fedge.deploy.keys import make_keys

        made = make_keys(folder, host, nodes, days)
    typer.echo(f"On the server:   {made.ca}, {made.certificate}, {made.server_key}, and every node-*.key.pub")
    typer.echo(f"On node N:       {made.ca} and node-N.key ({nodes} of them)")
    typer.echo(f"On no machine:   {made.ca_key} (keep it offline, or delete it: new keys need a new CA then)")


def check(superlink: str, root_certificates: Path | None, key: Path | None, insecure: bool) -> None:
    """Say whether this node can work with that SuperLink, and if not, why."""
    if insecure == (root_certificates is not None):
        raise fail("give either --root-certificates FILE or --insecure", ASKED)
    with _deploying():
        from fedge.deploy.check import check as steps

        for line in steps(superlink, root_certificates, key):
            typer.echo(f"ok  {line}" if not line.startswith("note") else line)
    typer.echo("This node can join.")
