"""`fedge reproduce`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.markdown import Markdown

from fedge.cli import plan as plans
from fedge.cli.errors import INTERRUPTED, one_line
from fedge.cli.interrupt import Interrupt
from fedge.cli.listener import Say
from fedge.cli.paper import study as find_study
from fedge.cli.progress import Display
from fedge.cli.text import say
from fedge.data.catalogue import SHORT
from fedge.engine.runtime import check_precision
from fedge.engine.simulator import check_compile
from fedge.experiment import ExperimentError
from fedge.experiment.comparison import write_file
from fedge.sweep import Choices, Entry, Runner, Stopped, Study, entries, tune
from fedge.sweep.files import TUNE, check
from fedge.sweep.halving import SEED, TRIALS, is_tuned
from fedge.sweep.hardware import hardware
from fedge.sweep.processes import Tuning, run_in_processes
from fedge.sweep.runner import Listener, locked

ALSO = {name: short for short, name in SHORT.items()}  # `fashion_mnist` for `fmnist`
MORE = 3  # the exit code when the time was up before all runs were done


def reproduce(
    names: list[str],
    dataset: list[str] | None,
    method: list[str] | None,
    seeds: int,
    rounds: int | None,
    device: str,
    minutes: float | None,
    out: Path,
    precision: str,
    compile: bool,
    processes: int,
    paper: Path | None,
    plan: bool,
) -> None:
    """Repeat experiments of the paper and print its tables with our numbers beside them."""
    console = Console()
    with one_line():
        study = find_study(paper)
        chosen = [ALSO.get(one, one) for one in dataset or study.files.datasets[:1]]
        _known(study, names, chosen, method or [])
        runner = Runner(out, device, {"precision": precision, "compile": compile})
        _fits(runner.device, precision, compile)
        work = _Work(study, runner, chosen, method or list(study.files.grids()), seeds, rounds, console)
        if plan:
            work.plan(names)
            return
        with locked(out):
            code = work.all(names, None if minutes is None else time.monotonic() + 60 * minutes, processes)
    if code:
        raise typer.Exit(code)


def _known(study: Study, names: list[str], datasets: list[str], methods: list[str]) -> None:
    """Whether the study has what was named."""
    for name in names:
        check("experiment", name, (*study.files.experiments, TUNE))
    for one in datasets:
        check("dataset", one, study.files.datasets)
    for one in methods:
        check("method", one, tuple(study.files.grids()))


def _fits(device: str, precision: str, compile: bool) -> None:
    """What the engine would refuse, before anything is begun."""
    try:
        check_precision(precision, torch.device(device))
        check_compile(compile, torch.device(device))
    except ValueError as error:
        raise ExperimentError(str(error)) from None


class _Work:
    def __init__(
        self,
        study: Study,
        runner: Runner,
        datasets: list[str],
        methods: list[str],
        seeds: int,
        rounds: int | None,
        console: Console,
    ) -> None:
        self.study, self.runner, self.datasets, self.methods = study, runner, datasets, methods
        self.seeds, self.rounds, self.console = seeds, rounds, console
        self._said: set[tuple[str, str]] = set()  # data set and method that were not tuned

    def entries(self, name: str, dataset: str) -> list[Entry]:
        stores = [self.runner.out / TRIALS, self.study.chosen]
        ranked, diverged = Choices(stores, self.study.backbones), self.runner.store.diverged
        seeds = [SEED] if name == TUNE else range(self.seeds)
        found = entries(self.study.files, name, dataset, seeds, self.rounds, ranked, diverged)
        return [entry for entry in found if entry.method in self.methods]

    def _groups(self, names: list[str]) -> Iterator[tuple[str, str, list[Entry]]]:
        """The runs of every table: its name, its data set, its entries; in tuning, trials depend on earlier ones."""
        for dataset, name in product(self.datasets, names):
            if name != TUNE:
                yield name, dataset, self.entries(name, dataset)

    def plan(self, names: list[str]) -> None:
        every: list[Entry] = []
        for name in names:
            for dataset in self.datasets:
                wanted = self.entries(name, dataset)
                if name == TUNE:
                    lines = plans.tunings(wanted, self.study.files, Choices([self.runner.out / TRIALS]))
                else:
                    lines = plans.runs(wanted, self.runner)
                    every += wanted
                    if not wanted:
                        self._nothing(name, dataset)
                for line in lines:
                    say(self.console, line)
        if every:
            here = hardware(self.runner.device)
            say(self.console, plans.summary(every, self.runner.store, here, self.runner.all_engine))

    def _nothing(self, name: str, dataset: str) -> None:
        what = (
            dataset if self.methods == list(self.study.files.grids()) else f"{' or '.join(self.methods)} on {dataset}"
        )
        say(self.console, f"{name}: the paper's table has nothing on {what}")

    def all(self, names: list[str], deadline: float | None, processes: int = 1) -> int:
        """Runs everything, tuning first; returns the exit code."""
        names = sorted(names, key=lambda name: name != TUNE)
        with Interrupt(Display().stopping) as interrupt, self.console.status("starting") as status:
            self.runner.stop = _stop(interrupt, deadline)
            self.runner.listener = said = Say(self.console, status)
            try:
                if processes > 1:
                    self._together(names, processes, said)
                for dataset in self.datasets:  # outside, so that its data are loaded once for all names
                    for name in names:
                        self._one(name, dataset)
            except Stopped:
                pass
            except KeyboardInterrupt:
                return INTERRUPTED
            else:
                return 0
        self._write_some(names)
        say(self.console, f"Stopped: {self._so_far(names)}the same command goes on from here.")
        if processes == 1 and not said.rounds and not interrupt.wanted():
            say(self.console, "No round was done in this time: give it more --minutes.")
        return INTERRUPTED if interrupt.wanted() else MORE

    def _so_far(self, names: list[str]) -> str:
        """How far the runs are; tuning is not counted, because each trial depends on the one before."""
        wanted = [entry for _, _, group in self._groups(names) for entry in group]
        return f"{plans.done(wanted, self.runner.store)}; " if wanted else ""

    def _together(self, names: list[str], processes: int, said: Say) -> None:
        """Everything in several processes; what comes after it finds all runs done, and shows them."""
        if TUNE in names:
            tunings = self._missing_tunings()
            said.several(len(tunings), processes)
            run_in_processes(self.runner, tunings, processes, said.done)
        for _, _, group in self._groups(names):
            self._untuned(group)
        while wanted := self._missing(names):  # where a run diverged, the next best setting is tried
            said.several(len(wanted), processes)
            run_in_processes(self.runner, wanted, processes, said.done)
        self.runner.listener = Listener()

    def _missing_tunings(self) -> list[Tuning]:
        files = self.study.files
        found = {(dataset, entry.method) for dataset in self.datasets for entry in self.entries(TUNE, dataset)}
        every = [Tuning(files, dataset, method, self.rounds) for dataset, method in sorted(found)]
        return [one for one in every if not is_tuned(self.runner, files, one.dataset, one.rounds, one.method)]

    def _missing(self, names: list[str]) -> list[Entry]:
        """Runs that have no result yet, each once."""
        found: dict[str, Entry] = {}
        for _, _, group in self._groups(names):
            for entry in group:
                found.setdefault(entry.key, entry)
        return [entry for key, entry in found.items() if self.runner.store.find(key) is None]

    def _one(self, name: str, dataset: str) -> None:
        if name == TUNE:
            for line in tune(self.runner, self.study.files, dataset, self.rounds, self.methods):
                say(self.console, f"chosen for {line.get('cell', dataset)}, {line['method']}: {line['setting']}")
            return
        wanted = self.entries(name, dataset)
        if not wanted:
            self._nothing(name, dataset)
            return
        self._untuned(wanted)
        done: list[Entry] = []
        while done != wanted:  # where a run diverged, the next best setting is tried
            for entry in wanted:
                self.runner.run(entry)
            done, wanted = wanted, self.entries(name, dataset)
        self._show(name, dataset, wanted)

    def _untuned(self, wanted: list[Entry]) -> None:
        for dataset, method in dict.fromkeys((entry.dataset, entry.method) for entry in wanted if entry.rank is None):
            if (dataset, method) not in self._said:
                say(self.console, f"{method} was not tuned on {dataset}: the values of the files are used")
            self._said.add((dataset, method))

    def _write_some(self, names: list[str]) -> None:
        """The tables that have a result, as far as they are, to files alone: the user asked to stop."""
        for name, dataset, wanted in self._groups(names):
            if any(self.runner.store.find(entry.key) for entry in wanted):
                page, _ = self._write(name, dataset, wanted)
                say(self.console, f"Table so far   {page}")

    def _write(self, name: str, dataset: str, wanted: list[Entry]) -> tuple[Path, str]:
        """The table and the claims to a file, with what they were measured with."""
        store = self.runner.store
        page, text = self.runner.out / f"{name}-{dataset}.md", self.study.page(wanted, store)
        write_file(page, f"{text}\n\n{self.study.details(wanted, store)}\n".encode())
        return page, text

    def _show(self, name: str, dataset: str, wanted: list[Entry]) -> None:
        page, text = self._write(name, dataset, wanted)
        self.console.print(Markdown(text))
        say(self.console, f"Table    {page}")
        picture = self.study.draw(wanted, self.runner.store, page.with_suffix(".png"))
        say(self.console, f"Figure   {picture or 'needs matplotlib: pip install fedge[report]'}")


def _stop(interrupt: Interrupt, deadline: float | None) -> Callable[[], bool]:
    return lambda: interrupt.wanted() or (deadline is not None and time.monotonic() >= deadline)
