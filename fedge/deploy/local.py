"""An experiment on a fleet on this machine alone: everything is started, followed and stopped from here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from fedge.deploy.bundle import write_app
from fedge.deploy.events import STOP, Reader
from fedge.deploy.fleet import SERVER, Fleet, FleetError
from fedge.deploy.folder import fleet_folder
from fedge.experiment import Experiment, ExperimentError, Outcome, Plan, Progress, Setup, Watch, plan, slug
from fedge.experiment.loading import load_run
from fedge.experiment.planning import may_bring_clients
from fedge.runs.experiments import EXPERIMENT_FILE
from fedge.runs.run import Run

SILENCE = 15.0  # seconds without news after which Flower is asked whether the run still goes on
MISSES = 4  # failures to answer, one after another, after which it is taken for dead


@dataclass(frozen=True)
class Options:
    """How long a phase may take, how many good replies it needs, where to say what goes on."""

    deadline: float = 120.0
    min_replies: int = 1
    wait: float = 120.0
    say: Callable[[str], None] = lambda line: None


@dataclass
class News:
    """What the server app told."""

    ended: dict[str, bool] = field(default_factory=dict)  # label -> whether it was stopped
    failed: dict[str, str] = field(default_factory=dict)
    timings: list[dict[str, float]] = field(default_factory=list)
    error: str | None = None
    done: bool = False


def plan_local(file: Path | None, settings: Sequence[str], out: Path | None, resume: bool, nodes: int | None) -> Plan:
    """As `fedge run` plans, with one node per client: `nodes` are the clients, unless the data bring theirs."""
    packed = Path(str(resources.files("fedge.deploy").joinpath("default.toml")))
    stored = resume and file is None and out is not None and (out / EXPERIMENT_FILE).is_file()
    chosen = [*settings]
    named = out / EXPERIMENT_FILE if stored and out is not None else file or packed
    if nodes is not None and not may_bring_clients(named, settings):
        chosen.append(f"partition.clients={nodes}")
    return plan(None if stored else file or packed, chosen, out, resume)


def check_nodes(nodes: int | None, setup: Setup) -> None:
    """A fleet has one node per client; how many there are, data that come with their clients say themselves."""
    clients = setup.federation.clients
    if nodes is not None and nodes != clients:
        raise ExperimentError(
            f"--nodes is {nodes}, the data come with {clients} clients and a fleet has one node per client: leave out "
            f"--nodes to start {clients}, or let [data] give {nodes} clients"
        )


def run_local(
    job: Plan, setup: Setup, watch: Watch, stop: Callable[[], bool], options: Options
) -> tuple[list[Outcome], News]:
    """Start a fleet with one node per client, run the experiment on it, stop everything, and read what it left."""
    with fleet_folder() as work, Fleet(work, setup.federation.clients, options.say) as fleet:
        config = {"out": str(job.folder.resolve()), "resume": job.resume, "news": str(work)}
        config |= {"keys": str(fleet.known_keys.folder)}
        limits = {"deadline": options.deadline, "min-replies": options.min_replies, "wait": options.wait}
        run = fleet.submit(write_app(work / "app", job.experiment), config | limits)
        news = follow(fleet, run, watch, stop, options.say)
    return _outcomes(job.experiment, job.folder, setup, news), news


def follow(
    fleet: Fleet, run: int, watch: Watch, stop: Callable[[], bool], say: Callable[[str], None] = lambda line: None
) -> News:
    """Pass the server app's news on until it is done, or dead."""
    reader, news, heard, told, missed = Reader(fleet.folder), News(), time.monotonic(), set[str](), 0
    while not news.done:
        for one in reader.news():
            heard, missed = time.monotonic(), 0
            _pass_on(one, watch, news, say)
        if stop():
            (fleet.folder / STOP).touch()
        _look_after(fleet, told, say)
        if not news.done and time.monotonic() - heard > SILENCE:
            status, missed = _asked(fleet, run, missed)
            heard = time.monotonic()
            if status.startswith("finished") and not _late_news(reader, watch, news, say):
                words = fleet.last_words(SERVER) or "it wrote nothing"
                raise FleetError(f"the server app ended without a message ({status}): {words}; go on with --resume")
        time.sleep(0.2)
    if news.error is not None:
        raise FleetError(news.error)
    return news


def _asked(fleet: Fleet, run: int, missed: int) -> tuple[str, int]:
    """What Flower says about the run, and how often in a row it failed to: a busy moment does not end a run."""
    try:
        return fleet.status(run), 0
    except FleetError:
        if missed + 1 >= MISSES:
            raise
        return "unknown", missed + 1


def _look_after(fleet: Fleet, told: set[str], say: Callable[[str], None]) -> None:
    """A node that ended costs its client; without its SuperLink or SuperExec there is no run."""
    for part in fleet.gone():
        ended = f"{part} ended: {fleet.processes[part].last_words()}"
        if part in ("superlink", "superexec"):
            raise FleetError(ended)
        if part not in told:
            told.add(part)
            say(ended)


def _late_news(reader: Reader, watch: Watch, news: News, say: Callable[[str], None]) -> bool:
    for one in reader.news():
        _pass_on(one, watch, news, say)
    return news.done


def _pass_on(one: dict[str, Any], watch: Watch, news: News, say: Callable[[str], None]) -> None:
    event, label = one["event"], one["label"]
    progress = Progress(**one["progress"]) if one["progress"] else Progress(0, 0)
    if event == "say":
        say(one["line"])
    elif event == "begin":
        watch.begin(label, progress)
    elif event == "round":
        watch.round(label, progress, one["record"])
        for fault in one["record"].get("faults", []):
            say(f"round {one['record']['round']}: {fault}")
        for drop in one["record"]["dropped"]:
            say(
                f"round {one['record']['round']}: client {drop['client']} dropped in '{drop['task']}': {drop['reason']}"
            )
    elif event == "phase":
        news.timings.append(one["timing"])
    elif event == "end":
        news.ended[label] = one["stopped"]
        watch.end(label, progress, Ended(one["stopped"]))  # type: ignore[arg-type]
    elif event == "fail":
        news.failed[label] = one["reason"]
        watch.fail(label, progress, one["reason"])
    elif event == "done":
        news.done, news.error = True, one["error"]


@dataclass(frozen=True)
class Ended:
    """All that a display asks of a run that ended elsewhere."""

    stopped: bool


def _outcomes(experiment: Experiment, folder: Path, setup: Setup, news: News) -> list[Outcome]:
    found = []
    for label in experiment.labels:
        where = folder / slug(label)
        if label in news.failed:
            found.append(Outcome(label, where, None, news.failed[label]))
        elif label in news.ended:
            found.append(Outcome(label, where, reopen(where, setup, label, news.ended[label])))
    return found


def reopen(folder: Path, setup: Setup, label: str, stopped: bool = False) -> Run[Any]:
    """A run from its folder, as training would have returned it."""
    return replace(load_run(folder, setup.algorithms[label]), stopped=stopped)


def mean_phase(timings: Sequence[dict[str, float]]) -> str | None:
    """Where the seconds of a phase went, on average."""
    if not timings:
        return None
    whole, start, work = (sum(one[key] for one in timings) / len(timings) for key in ("seconds", "start", "work"))
    rest = whole - start - work
    return (
        f"A phase took {whole:.1f} s: {start:.1f} s to start processes at the nodes, {work:.1f} s of work, "
        f"{rest:.1f} s of messages and waiting (mean of {len(timings)}, the slowest node of each)"
    )
