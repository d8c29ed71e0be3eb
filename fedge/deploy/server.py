"""The server's side: Flower apps of an experiment file, and training over a grid from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedge.core import Algorithm, S
from fedge.deploy.client import Algorithms, Examples, client_app, rows_of
from fedge.deploy.events import Reporter
from fedge.deploy.flower import FlowerLink
from fedge.deploy.identity import read_keys
from fedge.deploy.replies import check_replies
from fedge.deploy.roster import Roster
from fedge.experiment import Setup, build, compare, load, plan, slug
from fedge.federation import Federation
from fedge.hooks import Observe
from fedge.inputs import take
from fedge.loop import train
from fedge.runs.experiments import is_run
from fedge.runs.run import Run


def shown(line: str) -> None:
    """Print a line, with escapes in place of letters that standard output does not have: nodes say some of it."""
    try:
        print(line)
    except UnicodeEncodeError:
        print(line.encode("ascii", "backslashreplace").decode())


def serve(
    grid: Grid,
    algorithm: Algorithm[S],
    federation: Federation,
    *,
    nodes: int | None = None,
    wait: float = 120.0,
    deadline: float = 600.0,
    min_replies: int = 1,
    say: Callable[[str], None] = shown,
    keys: Path | str | None = None,
    **training: Any,
) -> Run[S]:
    """Train over a grid, from a ServerApp of your own; `training` is what `fedge.train` takes.

    Begins when `nodes` of them (None: one per client) are connected, or after `wait` seconds with those that are.
    `keys` is a folder with the nodes' public keys, node-N.key.pub for client N.
    """
    roster = Roster(grid, federation.clients, [""], say, keys=read_keys(keys) if keys else None)
    roster.wait(federation.clients if nodes is None else nodes, wait, deadline)
    resumed = bool(training.get("resume"))
    link = FlowerLink(algorithm, federation, grid, roster, deadline=deadline, min_replies=min_replies, resumed=resumed)
    observe = replace(training.pop("observe", None) or Observe(), checkpoint_every=1)  # devices remember one round back
    return train(algorithm, federation, link=link, observe=observe, **training)


@cache
def _setup(file: Path | str) -> Setup:
    """Once per process, and at module level: Flower's simulation pickles the app into its own processes."""
    return build(load(file))


def experiment_client(file: Path | str) -> ClientApp:
    """The devices' app of an experiment file: each does the work of the client that its partition id names."""

    def algorithms() -> Algorithms:
        return _setup(file).algorithms

    def examples(client: int) -> Examples:
        federation = _setup(file).federation
        mine = federation.examples(client)
        return take(federation.data.train_x, mine), federation.data.train_y[mine]

    return client_app(algorithms, examples)


def experiment_server(file: Path | str) -> ServerApp:
    """The server's app of an experiment file; the run configuration says where and how (`RUN_CONFIG`)."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = RUN_CONFIG | dict(context.run_config)
        reporter = Reporter(Path(str(config["news"])) if config["news"] else None)
        try:
            _compare(Path(file), grid, config, reporter)
        except BaseException as error:
            reporter.done(" ".join(str(error).split()) or type(error).__name__)
            raise
        reporter.done()

    return app


RUN_CONFIG: dict[str, Any] = {
    "out": "",  # folder for the runs; empty: runs/NAME where the server app is started
    "resume": False,
    "nodes": 0,  # begin when so many are connected; 0: one per client
    "wait": 120.0,  # or after so many seconds, with those that are
    "deadline": 600.0,  # seconds for one phase
    "min-replies": 1,
    "keys": "",  # folder with the nodes' public keys, node-N.key.pub for client N; empty: whoever comes first
    "news": "",  # a folder in which a command line on this machine listens
}


def _holds(setup: Setup, client: int, label: str) -> list[int]:
    """The rows that a client of the experiment works on."""
    federation = setup.federation
    return rows_of(setup.algorithms[label], federation.data.train_y[federation.examples(client)])


def _compare(file: Path, grid: Grid, config: Mapping[str, Any], reporter: Reporter) -> None:
    job = plan(file, (), Path(str(config["out"])) if config["out"] else None, bool(config["resume"]))
    experiment = replace(job.experiment, train=job.experiment.train | {"checkpoint_every": 1})
    setup = build(experiment)
    check_replies(int(config["min-replies"]), setup)
    if not config["news"]:  # who listens has said so already
        reporter.say(f"{experiment.name} goes to {job.folder.resolve()}")
    sizes = setup.federation.sizes.tolist()
    keys = read_keys(str(config["keys"])) if config["keys"] else None
    roster = Roster(grid, setup.federation.clients, setup.algorithms, reporter.say, sizes, keys, partial(_holds, setup))
    deadline = float(config["deadline"])
    roster.wait(int(config["nodes"]) or setup.federation.clients, float(config["wait"]), deadline, reporter.stop)

    def link(label: str) -> FlowerLink:
        return FlowerLink(
            setup.algorithms[label],
            setup.federation,
            grid,
            roster,
            label=label,
            deadline=deadline,
            clocked=partial(reporter.phase, label),
            resumed=job.resume and is_run(job.folder / slug(label)),
            min_replies=int(config["min-replies"]),
        )

    compare(experiment, job.folder, resume=job.resume, watch=reporter, stop=reporter.stop, setup=setup, link=link)
