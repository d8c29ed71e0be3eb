"""Train the algorithms of an experiment one after another, each into its own run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedge import toml
from fedge.core import Algorithm
from fedge.engine import BaseLink, Group, TooFewReplies
from fedge.experiment.errors import ExperimentError
from fedge.experiment.fields import Table
from fedge.experiment.meter import Meter, Progress
from fedge.experiment.own import copies
from fedge.experiment.parsing import Experiment
from fedge.experiment.setup import Setup, build
from fedge.experiment.training import basics_of, engine_of, observe_of
from fedge.loop import train
from fedge.runs import atomic
from fedge.runs.experiments import EXPERIMENT_FILE, forget_failure, note_failure, records, run_folders, slug
from fedge.runs.folder import RunFolder, RunFolderError
from fedge.runs.log import About
from fedge.runs.record import why_ended
from fedge.runs.run import Record, Run, absurd


class Watch:
    """Is told how runs go. This one says nothing."""

    def begin(self, label: str, progress: Progress) -> None: ...

    def round(self, label: str, progress: Progress, record: Record) -> None: ...

    def end(self, label: str, progress: Progress, run: Run[Any]) -> None: ...

    def fail(self, label: str, progress: Progress, reason: str) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """A run that ended: by itself, because it was stopped, or because it diverged."""

    label: str
    folder: Path
    run: Run[Any] | None  # None: it failed before its last round
    failed: str | None = None  # why, in one line


def compare(
    experiment: Experiment,
    out: Path | str,
    *,
    resume: bool = False,
    watch: Watch | None = None,
    stop: Callable[[], bool] = lambda: False,
    setup: Setup | None = None,
    link: Callable[[str], BaseLink] | None = None,
    group: Group | None = None,
) -> list[Outcome]:
    """Run every algorithm into out/<label>/; stops after the phase in which `stop` says so.

    `link` makes what carries an algorithm's phases, from its label; by default each is simulated.

    With `resume` finished runs are only read, started ones go on from their checkpoint, and the others begin. An
    algorithm that diverges is an outcome that says why, and the others go on. The processes of a `group` train
    together: every one of them calls this, and rank 0 alone has the folder and the watch.
    """
    setup = build(experiment) if setup is None else setup
    job = _Job(experiment, Path(out), resume, watch or Watch(), stop, setup, link, group or Group())
    with ExitStack() as stack:
        job.group.first(lambda: _enter(stack, job))
        if resume:
            return job.resumed()
        job.write_experiment()
        return list(job.outcomes())


@dataclass(frozen=True)
class _Job:
    experiment: Experiment
    out: Path
    resume: bool
    watch: Watch
    stop: Callable[[], bool]
    setup: Setup
    link: Callable[[str], BaseLink] | None
    group: Group

    def outcomes(self) -> Iterator[Outcome]:
        for label, algorithm in self.setup.algorithms.items():
            if self.group.any(self.stop()):
                return
            yield self.run(label, algorithm)

    def resumed(self) -> list[Outcome]:
        """The folder's experiment becomes this one when its first run goes on, and stays what it was if any cannot."""
        path, found = self.out / EXPERIMENT_FILE, list[Outcome]()
        before = self.group.first(lambda: path.read_text("utf-8") if path.is_file() else None)
        try:
            for outcome in self.outcomes():
                found.append(outcome)
                if len(found) == 1:
                    self.write_experiment()
        except RunFolderError:
            if before is not None:
                self._write(before)
            raise
        return found

    def run(self, label: str, algorithm: Algorithm[Any]) -> Outcome:
        folder = self.out / slug(label)
        before = records(folder) if self.resume and self.group.leads else ()
        meter = Meter(self.experiment.train["rounds"], before, limit=absurd(algorithm))
        self.watch.begin(label, meter.progress)
        try:
            run = self._train(label, algorithm, folder, lambda record: self.watch.round(label, meter(record), record))
        except TooFewReplies as error:  # of this algorithm alone
            reason = why_ended(algorithm, error)
            self.watch.fail(label, meter.progress, reason)
            self.group.first(lambda: note_failure(folder, reason))
            return Outcome(label, folder, None, reason)
        if run.diverged is not None and not run.stopped:
            reason = run.diverged
            self.watch.fail(label, meter.total(run.history), reason)
            self.group.first(lambda: note_failure(folder, reason))
            return Outcome(label, folder, run, reason)
        self.group.first(lambda: forget_failure(folder))
        self.watch.end(label, meter.total(run.history), run)
        return Outcome(label, folder, run)

    def _train(
        self, label: str, algorithm: Algorithm[Any], folder: Path, on_round: Callable[[Record], None]
    ) -> Run[Any]:
        return train_one(
            self.experiment,
            label,
            self.setup,
            folder,
            resume=self.resume and self.group.first(folder.is_dir),
            on_round=on_round,
            stop=self.stop,
            link=self._link(label, algorithm),
        )

    def _link(self, label: str, algorithm: Algorithm[Any]) -> BaseLink:
        if self.link is not None and self.group.size == 1:
            if self.setup.edge is not None:
                raise ExperimentError(
                    "edge: a real fleet has devices and a time of its own: leave out the table [edge]"
                )
            return self.link(label)
        with self.group.together():
            rounds = self.setup.train["rounds"]
            try:
                engine = engine_of(self.setup.train)
                return self.setup.clocked(engine.link(algorithm, self.setup.federation, self.group, rounds=rounds))
            except ExperimentError:
                raise
            except ValueError as error:  # a field of [train] or [edge]
                raise ExperimentError(f"{label}: {error}") from error

    def write_experiment(self) -> None:
        """So that the folder alone is enough to go on."""
        self.group.first(lambda: write_copies(self.experiment.table(), self.out))
        self._write(toml.dump(self.experiment.table()))

    def _write(self, text: str) -> None:
        self.group.first(lambda: write_file(self.out / EXPERIMENT_FILE, text.encode()))


def _enter(stack: ExitStack, job: _Job) -> None:
    """Nobody else writes into this experiment's folder: another resume would begin with what is finished."""
    stack.enter_context(RunFolder(job.out).held())
    check_folders(job.out / slug(label) for label in job.setup.algorithms)
    if not job.resume and any(RunFolder(one).begun for one in run_folders(job.out)):
        raise RunFolderError(f"{job.out} already holds a run: resume it, or choose another folder")


def check_folders(runs: Iterable[Path]) -> None:
    """Runs go into folders of their own, and not to where links in a folder from somebody else lead."""
    try:
        for run in runs:
            atomic.refuse_link(run)
    except OSError as error:
        raise ExperimentError(f"cannot write to {error.filename}: {error.strerror}") from error


def train_one(
    experiment: Experiment,
    label: str,
    setup: Setup,
    folder: Path,
    *,
    resume: bool,
    on_round: Callable[[Record], None],
    stop: Callable[[], bool],
    link: BaseLink,
) -> Run[Any]:
    """Train one algorithm of an experiment into its folder."""
    try:
        return train(
            setup.algorithms[label],
            setup.federation,
            **basics_of(setup.train),
            observe=observe_of(setup.train),
            out=folder,
            resume=resume,
            about=About(experiment.name, experiment.config(label)),
            on_round=on_round,
            stop=stop,
            link=link,
        )
    except RunFolderError:
        raise
    except ValueError as error:  # what only shows once algorithm and data meet
        raise ExperimentError(f"{label}: {error}") from error


def write_copies(tables: Table, out: Path) -> None:
    """The user's own files as they are run, for when somebody changes them."""
    for name, content in copies(tables).items():
        write_file(out / name, content)


def write_file(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_atomically(path, content)
    except OSError as error:
        raise ExperimentError(f"cannot write {path}: {error.strerror or error}; choose another folder") from error
