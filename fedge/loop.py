"""Training: drive an algorithm over a link, round by round, and keep the record."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, get_args

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree

from fedge import preflight, secret
from fedge.checks import at_least_one, choice
from fedge.core import Algorithm, Ask, At, Params, Progress, S, drive
from fedge.engine import Engine, RankError, TooFewReplies
from fedge.engine.links.base_link import Around, BaseLink, Replies
from fedge.engine.links.nobody import Nobody, NobodyDrawn
from fedge.engine.uploads import checks
from fedge.evaluate import problem_at
from fedge.federation import Federation
from fedge.handle import parameters
from fedge.hooks import Best, Observe, Until
from fedge.keys import COHORT, choose, fold
from fedge.metrics import Metric, named
from fedge.per_client import Jury, with_names
from fedge.problem import check_metrics
from fedge.runs.folder import RunFolderError
from fedge.runs.health import is_evaluated
from fedge.runs.log import About, Log, describe, open_log
from fedge.runs.record import record_of
from fedge.runs.run import Kept, Record, Run

Draw = Callable[[At], Tensor]
Sampling = Literal["fixed", "poisson"]


def train(
    algorithm: Algorithm[S],
    federation: Federation,
    *,
    rounds: int,
    cohort: int | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    out: Path | str | None = None,
    start: Run[S] | None = None,
    resume: bool = False,
    engine: Engine | None = None,
    observe: Observe | None = None,
    metrics: Mapping[str, Metric | str] | Sequence[str] | None = None,
    link: BaseLink | None = None,
    about: About | None = None,
    on_round: Callable[[Record], None] | Iterable[Callable[[Record], None]] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Run[S]:
    """Train for so many rounds with `cohort` clients in each (None: all of them), and evaluate.

    With `sampling` "poisson" every client is drawn by itself, `cohort` of them on average; a round that finds nobody is
    skipped. "fixed" is exactly `cohort`, None what the algorithm needs: "poisson" for Private, "fixed" for others.

    `start` goes on from an earlier run: its state, its history, its round numbers; 10 rounds and 10 more are the
    20 of one run. `out` is a run folder; with `resume` the run in it goes on from its checkpoint until it has `rounds`
    rounds, and ends as if it had never stopped. `engine` says how clients are simulated (`device` alone is short for
    Engine(device)), `observe` how often the run is evaluated and saved, with which metrics, and when it is enough;
    `metrics`, such as ["f1"] or {"mine": function}, is short for Observe(metrics=...). Another `link` carries the
    phases elsewhere. `on_round` is one function of a round's record, or several.
    `stop` is asked before every phase: if it says so, training ends at the last complete round.
    On a link of several processes (`Ranks`) rank 0 alone evaluates, writes, and is told of rounds.
    """
    preflight.check_arguments(algorithm, federation, seed)
    observe = _observing(observe, metrics, algorithm, federation)
    at_least_one("rounds", rounds)
    privacy = algorithm.privacy()
    sampling = sampling or ("fixed" if privacy is None else "poisson")
    trains = observe.evaluate_train or (observe.per_client and federation.test is None)
    preflight.check_privacy(privacy, federation.clients, cohort, sampling, trains, link)
    _check_resume(resume, start, out)
    draw = cohorts(federation.clients, cohort, sampling, privacy.secret if privacy else None)
    if link is None:
        link = _engine(engine, device).expecting(algorithm, rounds).link(algorithm, federation, rounds=rounds)
    preflight.check_link(algorithm, link)
    draw = _chosen(link, federation.clients, cohort, sampling) or draw
    link = Nobody(link) if sampling == "poisson" else link
    about = about or About()
    if about.config is None and out is not None:
        settings = {"rounds": rounds, "cohort": cohort, "seed": seed, **observe.settings()}
        settings |= {"sampling": sampling} if sampling != "fixed" else {}
        about = replace(about, config=describe(algorithm, federation, settings))
    log = open_log(out, about, link, observe.checkpoint_every)
    training = _training(algorithm, federation, link, log, seed, cohort, draw, observe, on_round)
    with nullcontext() if log is None else log.held(resume):
        run, last = training.open(federation, start, resume, rounds)
        run.problem = problem_at(algorithm, run.handle, link.runtime.x, federation.data.train_y, federation.data.values)
        with link.working():
            training.rounds(run, last, stop)
    return run


def _observing(
    observe: Observe | None,
    metrics: Mapping[str, Metric | str] | Sequence[str] | None,
    algorithm: Algorithm[Any],
    federation: Federation,
) -> Observe:
    """What is observed, with the metrics that were given beside it; each fits what is learnt."""
    y, found = federation.data.train_y, observe or Observe()
    check_metrics(metrics or (), y, algorithm.loss)
    if metrics is not None:
        found = replace(found, metrics=named(found.metrics) | named(metrics))
    check_metrics(found.functions, y, algorithm.loss)
    return found


def _training(
    algorithm: Algorithm[S],
    federation: Federation,
    link: BaseLink,
    log: Log | None,
    seed: int,
    cohort: int | None,
    draw: Draw,
    observe: Observe,
    on_round: Callable[[Record], None] | Iterable[Callable[[Record], None]] | None,
) -> Training[S]:
    """Of several processes one alone evaluates and is told of rounds."""
    leads = link.runtime.group.leads
    return Training(
        algorithm,
        link,
        log,
        seed,
        cohort or federation.clients,
        draw,
        Jury(federation, link.runtime, observe) if leads else None,
        observe.evaluate_every,
        () if not leads or on_round is None else (on_round,) if callable(on_round) else tuple(on_round),
        observe.until,
        observe.best,
        federation.name if federation.names else None,
    )


def _check_resume(resume: bool, start: Run[Any] | None, out: Path | str | None) -> None:
    if resume and start is not None:
        raise ValueError("give either start (a Run) or resume (a run folder), not both")
    if resume and out is None:
        raise RunFolderError("resume needs the run folder to go on from: give `out`")


def _chosen(link: BaseLink, clients: int, cohort: int | None, sampling: Sampling) -> Draw | None:
    """How a link chooses cohorts, if it does."""
    found = link.choosing(clients, cohort or clients)
    if found is not None and sampling != "fixed":
        raise ValueError(f"sampling is {sampling!r}, but the link chooses cohorts by itself: leave out one of them")
    return found


def _engine(engine: Engine | None, device: torch.device | str | None) -> Engine:
    if engine is None:
        return Engine(device="cpu" if device is None else str(device))
    if device is not None:
        raise ValueError(
            f"device is {str(device)!r} and there is an engine as well: write Engine(device={str(device)!r})"
        )
    return engine


@dataclass(frozen=True)
class Training(Generic[S]):
    """What stays the same from the first round of a run to its last."""

    algorithm: Algorithm[S]
    link: BaseLink
    log: Log | None
    seed: int
    size: int  # of a cohort
    draw: Draw
    judge: Jury | None
    evaluate_every: int
    on_round: tuple[Callable[[Record], None], ...] = ()
    until: Until | None = None
    best: Best | None = None
    name: Callable[[int], str] | None = None  # what clients are called, if they have names

    def open(self, federation: Federation, start: Run[S] | None, resume: bool, rounds: int) -> tuple[Run[S], int]:
        """The run to go on with: from a folder, an earlier run or the beginning; and the number of its last round."""
        if resume and self.log is not None and self.log.resumable:
            run = self.log.reopen(self.algorithm, rounds)
            with self.log.usable():
                preflight.check_start(self.algorithm.init(self.first_params()), run.state)
                self.link.remember(run.memory)
            self.replay(run)
            run.kept = None if self.best is None else self.log.kept(run)
            return run, rounds
        run = self.begin() if start is None else self.continued(start)
        if self.log is not None:
            self.log.create(federation, run)
        return run, run.rounds + rounds

    def first_params(self) -> Params:
        """The module's own, on the device."""
        device = self.link.runtime.device
        return {name: leaf.to(device) for name, leaf in parameters(self.algorithm.model).items()}

    def begin(self) -> Run[S]:
        """A fresh run after its setup."""
        params = self.first_params()
        preflight.check_model(self.algorithm, self.link.runtime, params)
        self.link.begin(row for row in self.link.ledger if row.task == "rows")
        self.link.remember({})
        state, _ = drive(self.algorithm.setup(self.algorithm.init(params)), self.link, self.seed, 0, self.draw)
        return self.run(state, [])

    def run(self, state: S, history: list[Record], memory: Record | None = None) -> Run[S]:
        runtime = self.link.runtime
        ledger = self.link.ledger
        return Run(self.algorithm, state, runtime.handle, history, ledger, memory or {}, example=runtime.example)

    def continued(self, start: Run[S]) -> Run[S]:
        """An earlier run, with setup done again and not counted again."""
        device = self.link.runtime.device
        state = self.algorithm.adopt(pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), start.state))
        params = self.first_params()
        preflight.check_model(self.algorithm, self.link.runtime, params)
        preflight.check_start(self.algorithm.init(params), state)
        declared = [row for row in self.link.ledger if row.task == "rows" and row not in start.ledger.rows]
        self.link.begin([*start.ledger, *declared])
        run = self.run(state, list(start.history), start.memory)
        run.kept = start.kept if self.best is not None else None
        self.replay(run)
        return run

    def replay(self, run: Run[S]) -> None:
        """Do setup once more for what it leaves with the clients; its bytes were counted the first time.

        What clients remember is that of the run, whatever they wrote down in this setup.
        """
        rows = list(run.ledger.rows)
        drive(self.algorithm.setup(run.state), self.link, self.seed, 0, self.draw)
        run.ledger.rows[:] = rows
        self.link.remember(run.memory)

    def rounds(self, run: Run[S], last: int, stop: Callable[[], bool] | None) -> None:
        """The rounds that are left; a stop or a failure leaves the run at its last complete one."""
        warm_up()
        link = Interruptible(self.link, stop)
        for number in range(run.rounds + 1, last + 1):
            if self.enough(run):
                break
            before = len(run.ledger)
            try:
                record = self.one(run, link, number, last)
            except (Stop, TooFewReplies, RankError) as end:
                del run.ledger.rows[before:]
                run.stopped = True
                if isinstance(end, Stop):
                    break
                if not (isinstance(end, RankError) and self.link.remembers_elsewhere()):
                    self.end(run)
                if isinstance(end, RankError):
                    raise
                raise TooFewReplies(f"round {number}: {end}{run.way_back}", end.dropped) from end
            self._record(run, record, number == last, run.ledger.rows[before:])
        self.enough(run)
        self.end(run)

    def one(self, run: Run[S], link: Interruptible, number: int, last: int) -> Record:
        """A round; one without enough good uploads leaves the state as it is, unless too many before it did so."""
        begin, before = time.perf_counter(), len(run.ledger)
        try:
            return one_round(run, link, self.seed, number, self.draw, self.size)
        except TooFewReplies as end:
            good = next((at for at, one in enumerate(reversed(run.history)) if "skipped" not in one), None)
            row = len(run.history) if good is None else good
            skips = end.dropped or isinstance(end, Unusable)
            if not skips or row + 1 >= checks.IN_A_ROW or (good is None and number == last):
                raise
            self.link.abandon(number)
            link.progress.dropped += end.dropped
            about = record_of(run, self.link, link.progress, number, run.ledger.rows[before:], begin)
            return about | {"skipped": str(end) if "cohort" in about else "too few good uploads"}

    def enough(self, run: Run[S]) -> bool:
        """Whether the user's function ends the run here; asked after evaluated rounds, of several processes by one."""
        if self.until is None or not run.history:
            return False
        group = self.link.runtime.group
        run.ended = group.first(lambda: self._why(run) if is_evaluated(run.history[-1]) else "")
        return bool(run.ended)

    def _why(self, run: Run[S]) -> str:
        found = self.until(run.history) if self.until is not None else False
        return "until says that it is enough" if found is True else str(found or "")

    def _record(self, run: Run[S], record: Record, last: bool, rows: Iterable[Any]) -> None:
        if self.judge is not None and (record["round"] % self.evaluate_every == 0 or last):
            record |= self.judge(run)
        if self.name is not None:
            record = with_names(record, self.name)
        run.history.append(record)
        self._keep(run, record)
        if self.log is not None:
            self.log.round(run, record, list(rows))
        for tell in self.on_round:
            tell(copy.deepcopy(record))  # whatever it does with it, the history stays as it was

    def _keep(self, run: Run[S], record: Record) -> None:
        """The best round so far, the first of equally good ones; one that is not evaluated is not looked at."""
        value = None if self.best is None else self.best.value(record)
        if value is None or (run.kept is not None and value <= run.kept.value):
            return
        run.kept = Kept(record["round"], value, pytree.tree_map_only(Tensor, torch.clone, run.state))
        if self.log is not None:
            self.log.keep(run.kept)

    def end(self, run: Run[S]) -> None:
        run.memory = self.link.remembered(run.rounds)
        run.memory_bytes = self.link.memory_bytes()
        if self.log is not None:
            self.log.end(run)


def warm_up() -> None:
    """Let torch load what vmap and grad need, a second or two, before the first round is timed."""
    torch.func.vmap(torch.func.grad(torch.sum))(torch.zeros(1, 1))


class Stop(Exception):
    """Raised between two phases when the user asked to stop."""


class Interruptible(Around):
    """A link that can be left between two phases: not after the last one of a round, whose work would be lost."""

    def __init__(self, inner: BaseLink, stop: Callable[[], bool] | None) -> None:
        super().__init__(inner)
        self.stop = inner.stopping(stop)
        self.progress = Progress()  # of the round so far
        self.asked = False  # whether to stop, for the phase that comes

    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Replies:
        if not self.asked and self.stop():
            raise Stop
        self.asked = False
        if at.phase == 0:
            self.progress = Progress()
        self.progress.cohort |= set(clients.tolist())
        replies, dropped = self.inner.ask(at, asks, clients)
        self.progress.dropped += dropped
        return replies, dropped

    def advance(self, state: Any, seed: int, round: int, size: int) -> tuple[Any, Progress] | None:
        if self.stop():
            raise Stop
        self.progress = Progress()
        found = self.inner.advance(state, seed, round, size)
        self.asked = found is None  # an ordinary round: its first phase begins now
        return found


def cohorts(clients: int, cohort: int | None, sampling: Sampling = "fixed", hidden: str | None = None) -> Draw:
    """The draw of a cohort as a function of the address alone, or of a hidden file as well."""
    choice("sampling", sampling, get_args(Sampling))
    size = clients if cohort is None else cohort
    at_least_one("cohort", size)
    if size > clients:
        raise ValueError(f"cohort is {size}, but there are only {clients} clients: lower it to at most {clients}")
    if sampling == "fixed":
        return lambda at: choose(fold(at.seed, COHORT, at.round, at.phase), clients, size)
    key, rate = secret.read(hidden), size / clients
    return lambda at: secret.chosen(key, f"cohort {at.seed} {at.round} {at.phase}", clients, rate)


class Unusable(TooFewReplies):
    """Good uploads that the server can make no state of: the round is skipped as one without enough of them is."""


HINT = "lower the step size, or combine uploads by a robust rule (fedge.Robust). The rounds before it are kept"


def check_finite(state: Any) -> None:
    """Refuse a state that holds NaN or infinity: nothing can be trained from it, and the one before is still there."""
    leaves: dict[torch.dtype, list[Tensor]] = {}
    for leaf in pytree.tree_leaves(state):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
            leaves.setdefault(leaf.dtype, []).append(leaf)
    if not all(
        bool(torch.isfinite(torch.stack(torch._foreach_norm(some, torch.inf)).sum())) for some in leaves.values()
    ):
        raise Unusable(f"the new state is not finite, although every upload was: {HINT}")


def one_round(run: Run[S], link: BaseLink, seed: int, number: int, draw: Draw, size: int) -> Record:
    """Advance the run by one round and say what happened."""
    begin, before = time.perf_counter(), len(run.ledger)
    try:
        found = link.advance(run.state, seed, number, size)
        if found is None:
            found = drive(run.algorithm.round(run.state), link, seed, number, draw)
    except NobodyDrawn:
        found = run.state, Progress()
    except LinAlgError as error:  # of numbers that are finite, and whose squares are not
        what = " ".join(str(error).split())[:200]
        raise Unusable(f"the server cannot compute with the uploads, {what.rstrip('.')}: {HINT}") from error
    state, progress = found
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    check_finite(state)
    run.state = state
    return record_of(run, link, progress, number, run.ledger.rows[before:], begin)
