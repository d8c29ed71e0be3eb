"""Runs of an experiment file that sweeps: each keeps its folder, and the folders alone say what is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from fedge import toml
from fedge.engine import TooFewReplies
from fedge.engine.hardware.budget import is_out_of_memory
from fedge.experiment.comparison import check_folders, train_one, write_copies, write_file
from fedge.experiment.errors import ExperimentError
from fedge.experiment.fields import Table
from fedge.experiment.labels import place
from fedge.experiment.parsing import Experiment, parse
from fedge.experiment.setup import (
    Setup,
    build,
    check_clock,
    check_private,
    check_problem,
    check_run,
    check_train,
    edge_of,
    make_algorithm,
    make_model,
)
from fedge.experiment.sweeps import Sweep
from fedge.experiment.training import engine_of
from fedge.report import open_tracker
from fedge.runs.experiments import (
    EXPERIMENT_FILE,
    failure,
    forget_failure,
    is_finished,
    note_failure,
    records,
)
from fedge.runs.folder import RunFolderError
from fedge.runs.record import why_ended
from fedge.runs.run import Record, Run
from fedge.sweep.runner import Runner, Stopped, figures, release
from fedge.sweep.store import Line

EXPECTED = (ExperimentError, RunFolderError, TooFewReplies)  # errors whose words are enough


class Kept(NamedTuple):
    """One run whose folder stays: everything that a process needs to train it."""

    title: str
    config: Table
    folder: str
    tools: tuple[str, ...] = ()  # that follow it, such as "mlflow"

    @property
    def rounds(self) -> int:
        return int(self.config["train"]["rounds"])

    def __str__(self) -> str:
        return self.title


class State(NamedTuple):
    """How far a run is."""

    word: str  # done, failed, begun, to do
    rounds: int
    why: str = ""  # it failed


def kept_runs(sweep: Sweep, tools: Sequence[str] = ()) -> list[Kept]:
    """All runs of a sweep."""
    return [Kept(run.title, run.config, run.folder, tuple(tools)) for run in sweep.runs()]


def state(out: Path, run: Kept) -> State:
    """Read from the folder."""
    folder = out / run.folder
    count = len(records(folder))
    if why := failure(folder):  # also of one that is finished, and diverged
        return State("failed", count, why)
    if is_finished(folder, run.rounds, bool(run.config["train"].get("until"))):
        return State("done", count)
    return State("begun" if count else "to do", count)


def begin(out: Path, sweep: Sweep) -> None:
    """Write the sweep into its folder, so that the folder alone is enough to go on."""
    check_folders(out / run.folder for run in sweep.runs())
    write_copies(sweep.tables, out)
    write_file(out / EXPERIMENT_FILE, toml.dump(sweep.table()).encode())


def check_first(runner: Runner, sweep: Sweep) -> None:
    """What is wrong with the data, the model or any algorithm of the first experiment, said before anything starts."""
    first = sweep.first
    federation = runner.federation(first.data, first.partition)
    check_train(first.train, federation)
    made: dict[int, nn.Module] = {}

    def model(outputs: int) -> nn.Module:
        if outputs not in made:
            made[outputs] = make_model(first.model, federation.data, outputs)
        return made[outputs]

    for number, table in enumerate(first.algorithm, 1):
        cohort, seed = first.train["cohort"], first.train.get("seed")
        algorithm = make_algorithm(table, place(number, table), federation, model, cohort=cohort, seed=seed)
        check_clock(first, algorithm, place(number, table))
        check_private(edge_of(first.edge), algorithm, federation, place(number, table))
        check_run(first, algorithm, federation, place(number, table))
        check_problem(first, algorithm, federation, place(number, table))


def run_all(runner: Runner, runs: Iterable[Kept], done: Callable[[Kept, Line], None]) -> None:
    """One after another in this process."""
    for run in runs:
        if runner.stop():
            raise Stopped
        done(run, run_kept(runner, run, alone=True))


def run_kept(runner: Runner, run: Kept, alone: bool = False) -> Line:
    """Train a run, or go on with it; what goes wrong is left in its folder and returned, so that others go on.

    A lack of memory is an error unless the run is `alone`: later there may be room.
    """
    if runner.stop():
        raise Stopped
    folder = runner.out / run.folder
    forget_failure(folder)
    try:
        return _train(runner, run, folder)
    except Stopped:
        raise
    except Exception as error:
        if is_out_of_memory(error) and not alone:
            raise
        return _failed(run, folder, error)
    finally:
        release()


def _train(runner: Runner, run: Kept, folder: Path) -> Line:
    experiment = parse(run.config)
    (label,) = experiment.labels
    setup = build(experiment, federation=runner.federation(experiment.data, experiment.partition))
    begun = folder.is_dir()
    with ExitStack() as stack:
        opened = [stack.enter_context(open_tracker(tool, folder, run.title, run.config)) for tool in run.tools]

        def on_round(record: Record) -> None:
            runner.listener.round(run, record)
            for tracker in opened:
                tracker.log(record)

        trained = _one(experiment, label, setup, folder, resume=begun, on_round=on_round, stop=runner.stop)
    if trained.stopped:
        raise Stopped
    if trained.diverged is not None:
        note_failure(folder, trained.diverged)
    about = {"label": run.title, "rounds": trained.rounds, "failed": trained.diverged}
    return about | {"final_loss": trained.summary()["final_loss"]} | figures(trained)


def _one(experiment: Experiment, label: str, setup: Setup, folder: Path, **options: Any) -> Run[Any]:
    algorithm = setup.algorithms[label]
    link = setup.clocked(engine_of(setup.train).link(algorithm, setup.federation))
    try:
        return train_one(experiment, label, setup, folder, link=link, **options)
    except TooFewReplies as error:
        raise TooFewReplies(why_ended(algorithm, error)) from error


def _failed(run: Kept, folder: Path, error: Exception) -> Line:
    words = " ".join(str(error).split())
    why = words if isinstance(error, EXPECTED) else f"{type(error).__name__}: {words}"
    note_failure(folder, why)
    if not (folder / "config.toml").exists():  # it failed before it began: its row in the results says what it was
        write_file(folder / "config.toml", toml.dump(run.config).encode())
    return {"label": run.title, "rounds": len(records(folder)), "failed": why}


def missing(out: Path, runs: Sequence[Kept]) -> list[Kept]:
    """Those that are not done: also those that failed, which may go better now."""
    return [run for run in runs if state(out, run).word != "done"]
