"""`fedge reproduce`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markdown import Markdown

from fedge.cli import plan as plans
from fedge.cli.errors import INTERRUPTED, one_line
from fedge.cli.interrupt import Interrupt
from fedge.cli.progress import Display
from fedge.cli.run import say
from fedge.cli.telling import Say
from fedge.data.catalogue import SHORT
from fedge.engine.runtime import check_precision
from fedge.engine.simulator import check_compile
from fedge.experiment import ExperimentError
from fedge.reproduce import DATASETS, EXPERIMENTS, Campaign, Choices, Job, Stopped, jobs, tune
from fedge.reproduce.campaign import Tell, locked
from fedge.reproduce.claims import claims
from fedge.reproduce.figures import draw
from fedge.reproduce.hardware import hardware
from fedge.reproduce.measured import details
from fedge.reproduce.places import TUNE, check, paper, root
from fedge.reproduce.pool import Tuning, together
from fedge.reproduce.tables import table
from fedge.reproduce.tuning import SEED, TRIALS, methods

ALSO = {name: short for short, name in SHORT.items()}  # `fashion_mnist` for `fmnist`
MORE = 3  # the exit code when the time was up before all runs were done


def reproduce(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help=f"{', '.join(EXPERIMENTS)}; or {TUNE}.")],
    dataset: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(DATASETS)}. Repeatable; without it {DATASETS[0]}.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Only this one and its variants, such as FedOVA. Repeatable.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many: 0, 1, ...")] = 3,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Instead of those of the files.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin no phase after so long; the same command goes on.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for results and unfinished runs.")] = Path(
        "runs/reproduce"
    ),
    precision: Annotated[str, typer.Option(help="fp32; on a GPU also tf32 or bf16.")] = "fp32",
    compile: Annotated[bool, typer.Option("--compile", help="Compile recorded steps (GPU): slower start.")] = False,
    processes: Annotated[
        int, typer.Option("--jobs", min=1, help="Runs at a time, a process each: where one does not fill the GPU.")
    ] = 1,
    plan: Annotated[bool, typer.Option("--plan", help="Only say which runs there are and which are done.")] = False,
) -> None:
    """Repeat experiments of the paper and print its tables with our numbers beside them.

    Every finished run is a line of DIR/results.jsonl and is not repeated: a command that was stopped or killed goes on
    where it was. `tune` chooses every method's settings on a held-out part of the training set; what it chose, or what
    comes with fedge, is used by the others.

    Exit code 3: the time was up, and there is more to do. 130: it was interrupted.
    """
    console = Console()
    chosen = [ALSO.get(one, one) for one in dataset or [DATASETS[0]]]
    with one_line():
        for name in names:
            check("experiment", name, (*EXPERIMENTS, TUNE))
        for one in chosen:
            check("dataset", one, DATASETS)
        campaign = Campaign(out, device, {"precision": precision, "compile": compile})
        _fits(campaign.device, precision, compile)
        for one in method or []:
            check("method", one, tuple(methods()))
        work = _Work(campaign, chosen, method or methods(), seeds, rounds, console)
        if plan:
            work.plan(names)
            return
        with locked(out):
            code = work.all(names, None if minutes is None else time.monotonic() + 60 * minutes, processes)
    if code:
        raise typer.Exit(code)


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
        campaign: Campaign,
        datasets: list[str],
        methods: list[str],
        seeds: int,
        rounds: int | None,
        console: Console,
    ) -> None:
        self.campaign, self.datasets, self.methods = campaign, datasets, methods
        self.seeds, self.rounds, self.console = seeds, rounds, console
        self._said: set[tuple[str, str]] = set()  # data set and method that were not tuned

    def jobs(self, name: str, dataset: str) -> list[Job]:
        own, published = self.campaign.out / TRIALS, root() / "results" / TRIALS
        ranked, diverged = Choices([own, published]), self.campaign.store.diverged
        seeds = [SEED] if name == TUNE else range(self.seeds)
        found = jobs(name, dataset, seeds, self.rounds, ranked, diverged)
        return [job for job in found if job.method in self.methods]

    def _groups(self, names: list[str]) -> Iterator[tuple[str, str, list[Job]]]:
        """The runs of every table: its name, its data set, its jobs; of tuning, one trial follows from another."""
        for dataset, name in product(self.datasets, names):
            if name != TUNE:
                yield name, dataset, self.jobs(name, dataset)

    def plan(self, names: list[str]) -> None:
        every: list[Job] = []
        for name in names:
            for dataset in self.datasets:
                wanted = self.jobs(name, dataset)
                if name == TUNE:
                    lines = plans.tunings(wanted, Choices([self.campaign.out / TRIALS]))
                else:
                    lines = plans.runs(wanted, self.campaign)
                    every += wanted
                    if not wanted:
                        self._nothing(name, dataset)
                for line in lines:
                    say(self.console, line)
        if every:
            here = hardware(self.campaign.device)
            say(self.console, plans.summary(every, self.campaign.store, here, self.campaign.all_engine))

    def _nothing(self, name: str, dataset: str) -> None:
        what = dataset if self.methods == methods() else f"{' or '.join(self.methods)} on {dataset}"
        say(self.console, f"{name}: the paper's table has nothing on {what}")

    def all(self, names: list[str], deadline: float | None, processes: int = 1) -> int:
        """Runs everything, tuning first; returns the exit code."""
        names = sorted(names, key=lambda name: name != TUNE)
        with Interrupt(Display().stopping) as interrupt, self.console.status("starting") as status:
            self.campaign.stop = _stop(interrupt, deadline)
            self.campaign.tell = tell = Say(self.console, status)
            try:
                if processes > 1:
                    self._together(names, processes, tell)
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
        if processes == 1 and not tell.rounds and not interrupt.wanted():
            say(self.console, "No round was done in this time: give it more --minutes.")
        return INTERRUPTED if interrupt.wanted() else MORE

    def _so_far(self, names: list[str]) -> str:
        """How far the runs are; of tuning nothing can be said, for one trial follows from another."""
        wanted = [job for _, _, group in self._groups(names) for job in group]
        return f"{plans.done(wanted, self.campaign.store)}; " if wanted else ""

    def _together(self, names: list[str], processes: int, tell: Say) -> None:
        """Everything in several processes; what comes after it finds all runs done, and shows them."""
        if TUNE in names:
            found = {(dataset, job.method) for dataset in self.datasets for job in self.jobs(TUNE, dataset)}
            tell.several(len(found), processes)
            together(self.campaign, [Tuning(*one, self.rounds) for one in sorted(found)], processes, tell.done)
        for _, _, group in self._groups(names):
            self._untuned(group)
        while wanted := self._missing(names):  # what diverged gives way to the next best setting
            tell.several(len(wanted), processes)
            together(self.campaign, wanted, processes, tell.done)
        self.campaign.tell = Tell()

    def _missing(self, names: list[str]) -> list[Job]:
        """Runs that have no result yet, each once."""
        found: dict[str, Job] = {}
        for _, _, group in self._groups(names):
            for job in group:
                found.setdefault(job.key, job)
        return [job for key, job in found.items() if self.campaign.store.find(key) is None]

    def _one(self, name: str, dataset: str) -> None:
        if name == TUNE:
            for line in tune(self.campaign, dataset, self.rounds, self.methods):
                say(self.console, f"chosen for {line.get('cell', dataset)}, {line['method']}: {line['setting']}")
            return
        wanted = self.jobs(name, dataset)
        if not wanted:
            self._nothing(name, dataset)
            return
        self._untuned(wanted)
        done: list[Job] = []
        while done != wanted:  # what diverged gives way to the next best setting
            for job in wanted:
                self.campaign.run(job)
            done, wanted = wanted, self.jobs(name, dataset)
        self._show(name, dataset, wanted)

    def _untuned(self, wanted: list[Job]) -> None:
        for dataset, method in dict.fromkeys((job.dataset, job.method) for job in wanted if job.rank is None):
            if (dataset, method) not in self._said:
                say(self.console, f"{method} was not tuned on {dataset}: the values of the files are used")
            self._said.add((dataset, method))

    def _write_some(self, names: list[str]) -> None:
        """The tables that have a result, as far as they are, to files alone: who stops wants an end."""
        for name, dataset, wanted in self._groups(names):
            if any(self.campaign.store.find(job.key) for job in wanted):
                page, _ = self._write(name, dataset, wanted)
                say(self.console, f"Table so far   {page}")

    def _write(self, name: str, dataset: str, wanted: list[Job]) -> tuple[Path, str]:
        """The table and the claims to a file, with what they were measured with."""
        store = self.campaign.store
        cut = "".join(dict.fromkeys(f", {job.cut}" for job in wanted if job.cut))
        title = f"{paper()['titles'][name]}, {paper()['datasets'][dataset]}{cut}"
        said = "\n".join(f"- {line}" for line in claims(wanted, store))
        text = "\n\n".join([f"# {title}", table(wanted, store), said])
        page = self.campaign.out / f"{name}-{dataset}.md"
        page.write_text(f"{text}\n\n{details(wanted, store)}\n", "utf-8")
        return page, text

    def _show(self, name: str, dataset: str, wanted: list[Job]) -> None:
        page, text = self._write(name, dataset, wanted)
        self.console.print(Markdown(text))
        say(self.console, f"Table    {page}")
        picture = draw(wanted, self.campaign.store, page.with_suffix(".png"))
        say(self.console, f"Figure   {picture or 'needs matplotlib: pip install fedge[report]'}")


def _stop(interrupt: Interrupt, deadline: float | None) -> Callable[[], bool]:
    return lambda: interrupt.wanted() or (deadline is not None and time.monotonic() >= deadline)
