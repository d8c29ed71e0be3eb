"""Training: drive an algorithm over a link, round by round, and keep the record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedge.checks import at_least_one
from fedge.core import Algorithm, Ask, At, Drop, Params, Reply, S, drive
from fedge.engine.ranks.process_group import RankError
from fedge.engine.simulator import Simulator
from fedge.engine.uploads.replies import TooFewReplies
from fedge.evaluate import evaluate
from fedge.federation import Federation
from fedge.handle import cross_entropy, parameters
from fedge.keys import COHORT, choose, fold
from fedge.ledger import Ledger
from fedge.runs.folder import RunFolderError
from fedge.runs.log import Log, describe, group_of, open_log
from fedge.runs.run import Record, Run

Draw = Callable[[At], Tensor]


def train(
    algorithm: Algorithm[S],
    federation: Federation,
    *,
    rounds: int,
    cohort: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    out: Path | str | None = None,
    start: Run[S] | None = None,
    resume: bool = False,
    evaluate_every: int = 1,
    evaluate_train: bool = False,
    checkpoint_every: int = 10,
    config: Mapping[str, Any] | None = None,
    name: str | None = None,
    precision: str = "fp32",
    compile: bool = False,
    chunk: int | None = None,
    workers: int | None = None,
    link: Any = None,
    on_round: Callable[[Record], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Run[S]:
    """Train for so many rounds with `cohort` clients in each (None: all of them), and evaluate.

    `start` goes on from an earlier run: its state, its history, its round numbers; 10 rounds and 10 more are the
    20 of one run. `out` is a run folder; with `resume` the run in it goes on from its checkpoint until it has `rounds`
    rounds, and ends as if it had never stopped. `link` carries the phases; by default the vectorised simulator on
    `device` with this `precision`, `compile`, `chunk` and these `workers` (see `Simulator`). `stop` is asked before
    every phase: if it says so, training ends at the last complete round.
    On a link of several processes (`Ranks`) rank 0 alone evaluates, writes, and is told of rounds.
    """
    _check_arguments(algorithm, federation, seed)
    counts = {"rounds": rounds, "evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every}
    for field_name, value in counts.items():
        at_least_one(field_name, value)
    draw = cohorts(federation.clients, cohort)
    if link is None:
        options: Any = {"precision": precision, "compile": compile, "chunk": chunk, "workers": workers}
        link = Simulator(algorithm, federation, device=device, **options)
    _check_link(algorithm, link)
    settings = counts | {"cohort": cohort, "seed": seed, "evaluate_train": evaluate_train}
    log = open_log(out, config or describe(algorithm, federation, settings), name, link, checkpoint_every)
    run, last = _opened(algorithm, federation, link, log, start, resume, rounds, seed, draw)
    leads = group_of(link).leads
    judge = Judge(federation, link, evaluate_train) if leads else None
    on_round = on_round if leads else None
    with link.working():
        _rounds(run, Interruptible(link, stop), judge, log, seed, draw, last, evaluate_every, on_round)
    return run


def _opened(
    algorithm: Algorithm[S],
    federation: Federation,
    link: Any,
    log: Log | None,
    start: Run[S] | None,
    resume: bool,
    rounds: int,
    seed: int,
    draw: Draw,
) -> tuple[Run[S], int]:
    """The run to go on with, from a folder, an earlier run or its very beginning, and the number of its last round."""
    if resume and start is not None:
        raise ValueError("give either start (a Run) or resume (a run folder), not both")
    if resume and log is None:
        raise RunFolderError("resume needs the run folder to go on from: give `out`")
    if resume and log is not None and log.resumable:
        run = log.reopen(algorithm, rounds)
        replay(algorithm, link, run, seed, draw)
        return run, rounds
    run = _begin(algorithm, link, start, seed, draw)
    if log is not None:
        log.create(federation, run)
    return run, run.rounds + rounds


def _check_link(algorithm: Algorithm[S], link: Any) -> None:
    own = getattr(link, "algorithm", algorithm)
    if own is not algorithm:
        raise ValueError(f"the link was made for another {type(own).__name__}: make one with this algorithm object")


def _rounds(
    run: Run[S],
    link: Any,
    judge: Judge | None,
    log: Log | None,
    seed: int,
    draw: Draw,
    last: int,
    evaluate_every: int,
    on_round: Callable[[Record], None] | None,
) -> None:
    """The rounds that are left; a stop or a failure leaves the run at its last complete one."""
    warm_up()
    for number in range(run.rounds + 1, last + 1):
        before = len(run.ledger)
        try:
            record = one_round(run, link, seed, number, draw)
        except (Stop, TooFewReplies, RankError) as end:
            del run.ledger.rows[before:]
            run.stopped = True
            if isinstance(end, Stop):
                break
            if log is not None:
                log.end(run)
            if isinstance(end, RankError):
                raise
            raise TooFewReplies(f"round {number}: {end}") from end
        if judge is not None and (number % evaluate_every == 0 or number == last):
            record |= judge(run)
        run.history.append(record)
        if log is not None:
            log.round(run, record, run.ledger.rows[before:])
        if on_round is not None:
            on_round(record)
    if log is not None:
        log.end(run)


def warm_up() -> None:
    """Let torch load what vmap and grad need, a second or two, before the first round is timed."""
    torch.func.vmap(torch.func.grad(torch.sum))(torch.zeros(1, 1))


class Stop(Exception):
    """Raised between two phases when somebody wants training to end."""


class Interruptible:
    """A link that can be left between two phases: not after the last one of a round, whose work would be lost."""

    def __init__(self, link: Any, stop: Callable[[], bool] | None) -> None:
        self.link = link
        self.stop = link.agreed(stop) if hasattr(link, "agreed") else stop  # several processes stop together

    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> tuple[list[Reply], list[Drop]]:
        if self.stop is not None and self.stop():
            raise Stop
        answer: tuple[list[Reply], list[Drop]] = self.link.ask(at, asks, clients)
        return answer

    def share(self, at: At, beta: float) -> None:
        self.link.share(at, beta)

    def notes(self) -> Record:
        """What the link has to say about the round, if it is one that has."""
        found: Record = self.link.notes() if hasattr(self.link, "notes") else {}
        return found


def cohorts(clients: int, cohort: int | None) -> Draw:
    """The draw of a cohort as a function of the address alone."""
    size = clients if cohort is None else cohort
    at_least_one("cohort", size)
    if size > clients:
        raise ValueError(f"cohort is {size}, but there are only {clients} clients: lower it to at most {clients}")
    return lambda at: choose(fold(at.seed, COHORT, at.round, at.phase), clients, size)


def _begin(algorithm: Algorithm[S], link: Any, start: Run[S] | None, seed: int, draw: Draw) -> Run[S]:
    """A fresh run after its setup, or the earlier one with setup replayed and not counted again."""
    if start is None:
        params = {name: leaf.to(link.device) for name, leaf in parameters(algorithm.model).items()}
        _check(algorithm, link, params)
        link.ledger = Ledger([row for row in link.ledger if row.task == "rows"])  # a link may serve several runs
        state, _ = drive(algorithm.setup(algorithm.init(params)), link, seed, 0, draw)
        return Run(algorithm, state, link.handle, [], link.ledger)
    state = algorithm.adopt(pytree.tree_map_only(Tensor, lambda leaf: leaf.to(link.device), start.state))
    params = {name: leaf.to(link.device) for name, leaf in parameters(algorithm.model).items()}
    _check(algorithm, link, params)
    _check_start(algorithm.init(params), state)
    link.ledger.rows[:] = [*start.ledger, *(row for row in link.ledger if row not in start.ledger.rows)]
    run = Run(algorithm, state, link.handle, list(start.history), link.ledger)
    replay(algorithm, link, run, seed, draw)
    return run


def _check_arguments(algorithm: Any, federation: Any, seed: Any) -> None:
    """The slips that would otherwise surface deep inside."""
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"the first argument is {_kind(algorithm)}, it must be an algorithm such as FedAvg(model)")
    if not isinstance(federation, Federation):
        raise TypeError(f"the second argument is {_kind(federation)}, it must be a Federation(data, lists)")
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(f"seed is {seed!r}, it must be a whole number")


def _kind(thing: Any) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"


def _check(algorithm: Algorithm[Any], link: Any, params: Params) -> None:
    """One example through the model before any work is done; torch's own errors say neither what nor why."""
    x, y = link.population.x, link.population.y
    if y.is_floating_point() and algorithm.loss is cross_entropy:
        raise ValueError(
            f"the labels are {y.dtype} and the loss is cross-entropy: give class numbers as int64, or another loss="
        )
    try:
        algorithm.check(link.handle, params, x, y)
        link.handle.check_loss(params, x[:2], y[:2])
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(
            f"the model cannot take an example of shape {list(x.shape[1:])} and type {x.dtype}: {error}"
        ) from error


def _check_start(fresh: Any, state: Any) -> None:
    """An earlier run's state must be of this algorithm and of this model; what one of them lacks is not compared."""
    if isinstance(fresh, dict) and isinstance(state, dict):
        for name in fresh:
            if name not in state:
                raise ValueError(f"start is the run of another algorithm: its state has no {name!r}")
            _check_start(fresh[name], state[name])
    elif isinstance(fresh, list) and isinstance(state, list):
        for one, other in zip(fresh, state, strict=False):
            _check_start(one, other)
    elif isinstance(fresh, Tensor) and isinstance(state, Tensor) and fresh.shape != state.shape:
        shapes = f"{list(state.shape)}, here it is {list(fresh.shape)}"
        raise ValueError(f"start is the run of another model: a tensor of its state has shape {shapes}")


def replay(algorithm: Algorithm[S], link: Any, run: Run[S], seed: int, draw: Draw) -> None:
    """Do setup once more for what it leaves with the clients; its bytes were counted the first time."""
    rows = list(run.ledger.rows)
    drive(algorithm.setup(run.state), link, seed, 0, draw)
    run.ledger.rows[:] = rows


def one_round(run: Run[S], link: Any, seed: int, number: int, draw: Draw) -> Record:
    """Advance the run by one round and say what happened."""
    begin, before = time.perf_counter(), len(run.ledger)
    state, progress = drive(run.algorithm.round(run.state), link, seed, number, draw)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    run.state = state
    rows = run.ledger.rows[before:]
    return {
        "round": number,
        "cohort": sorted(progress.cohort),
        "up_bytes": sum(row.up for row in rows),
        "down_bytes": sum(row.down for row in rows),
        "seconds": time.perf_counter() - begin,
        "dropped": [drop._asdict() for drop in progress.dropped],
        **run.algorithm.notes(run.state),
        **(link.notes() if hasattr(link, "notes") else {}),
    }


class Judge:
    """Evaluates a run on the test set and, when wanted, on the training set."""

    def __init__(self, federation: Federation, link: Any, train: bool) -> None:
        data, pool = federation.data, link.population
        self.classes, self.judging = data.classes, link.judging
        x = data.test_x.to(pool.x.dtype).to(pool.x.device)
        self.sets = {"test": (x, data.test_y.to(pool.x.device))}
        if train:
            self.sets["train"] = (pool.x, pool.y)

    def __call__(self, run: Run[Any]) -> Record:
        record: Record = {}
        for name, (x, y) in self.sets.items():
            with self.judging():
                found = evaluate(run.algorithm, run.handle, run.state, x, y, self.classes)
            record |= {f"{name}_{key}": value for key, value in found.items()}
        return record
