"""A run from its first round to its last: begun, gone on with, or resumed; evaluated, recorded and saved."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedge import preflight
from fedge.core import Algorithm, Params, S, drive
from fedge.engine import RankError, TooFewReplies
from fedge.engine.links.base_link import BaseLink
from fedge.engine.links.nobody import TooFewDrawn
from fedge.engine.uploads import checks
from fedge.federation import Federation
from fedge.handle import parameters
from fedge.hooks import Best, Until
from fedge.loop.drawing import Draw
from fedge.loop.rounds import Interruptible, Stop, Unusable, one_round
from fedge.per_client import Jury, with_names
from fedge.runs.health import is_evaluated
from fedge.runs.log import Log
from fedge.runs.record import record_of
from fedge.runs.run import Kept, Record, Run


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
    shown: list[Record] = field(default_factory=list)  # the records once more, for `until`: it may change them

    def open(self, federation: Federation, start: Run[S] | None, resume: bool, rounds: int) -> tuple[Run[S], int]:
        """The run to go on with: from a folder, an earlier run or the beginning; and the number of its last round."""
        if resume and self.log is not None and self.log.resumable:
            run = self.log.reopen(self.algorithm, rounds)
            with self.log.usable():
                preflight.check_start(self.algorithm.init(self.first_params()), run.state, "it is")
                self.link.remember(run.memory)
            self.replay(run)
            run.kept = None if self.best is None else self.log.kept(run, self.best.values(run.history))
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
            skips = (
                end.dropped or link.progress.dropped or isinstance(end, Unusable | TooFewDrawn)
            )  # in any phase so far
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
        if self.until is None:
            return ""
        self.shown.extend(copy.deepcopy(run.history[len(self.shown) :]))
        found = self.until(list(self.shown))
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
        if self.log is not None and self.best is not None:
            self.log.keep(run.kept, self.best.by(record))

    def end(self, run: Run[S]) -> None:
        run.memory = self.link.remembered(run.rounds)
        run.memory_bytes = self.link.memory_bytes()
        if self.log is not None:
            self.log.end(run)


def warm_up() -> None:
    """Let torch load what vmap and grad need, a second or two, before the first round is timed."""
    torch.func.vmap(torch.func.grad(torch.sum))(torch.zeros(1, 1))
