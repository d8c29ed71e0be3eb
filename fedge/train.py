"""Training: drive an algorithm over a link, round by round, and keep the record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedge.checks import at_least_one
from fedge.core import Algorithm, At, Params, S, drive
from fedge.engine.ledger import Ledger
from fedge.engine.simulator import Simulator
from fedge.evaluate import evaluate, scores
from fedge.federation import Federation
from fedge.handle import Handle, parameters
from fedge.keys import COHORT, choose, fold

Record = dict[str, Any]


@dataclass
class Run(Generic[S]):
    """What training left: the server's state, one record a round, and every byte."""

    algorithm: Algorithm[S]
    state: S
    handle: Handle
    history: list[Record] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def rounds(self) -> int:
        return len(self.history)

    @property
    def params(self) -> Params:
        """The trained parameters by the module's own names."""
        return self.algorithm.params(self.state)

    def scores(self, x: Tensor) -> Tensor:
        """[N, ...] -> [N, classes], on the device of the parameters."""
        like = next(iter(self.params.values()))
        x = x.to(like.device, like.dtype) if x.is_floating_point() else x.to(like.device)
        return scores(self.algorithm, self.handle, self.state, x)

    def predict(self, x: Tensor) -> Tensor:
        """[N, ...] -> [N], the class with the largest score."""
        return self.scores(x).argmax(1)


def train(
    algorithm: Algorithm[S],
    federation: Federation,
    *,
    rounds: int,
    cohort: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    start: Run[S] | None = None,
    evaluate_every: int = 1,
    evaluate_train: bool = False,
    link: Any = None,
    on_round: Callable[[Record], None] | None = None,
) -> Run[S]:
    """Train for so many rounds with `cohort` clients in each (None: all of them), and evaluate.

    `start` goes on from an earlier run: its state, its history, its round numbers; 10 rounds and 10 more are the
    20 of one run. `link` carries the phases; by default the vectorised simulator on `device`.
    """
    at_least_one("rounds", rounds)
    at_least_one("evaluate_every", evaluate_every)
    draw = cohorts(federation.clients, cohort)
    link = Simulator(algorithm, federation, device=device) if link is None else link
    run = _begin(algorithm, link, start, seed, draw)
    judge = Judge(federation, link, evaluate_train)
    last = run.rounds + rounds
    with exact_float32():
        for number in range(run.rounds + 1, last + 1):
            record = one_round(run, link, seed, number, draw)
            if number % evaluate_every == 0 or number == last:
                record |= judge(run)
            run.history.append(record)
            if on_round is not None:
                on_round(record)
    return run


def cohorts(clients: int, cohort: int | None) -> Callable[[At], Tensor]:
    """The draw of a cohort as a function of the address alone."""
    size = clients if cohort is None else cohort
    at_least_one("cohort", size)
    if size > clients:
        raise ValueError(f"cohort is {size}, but there are only {clients} clients: lower it to at most {clients}")
    return lambda at: choose(fold(at.seed, COHORT, at.round, at.phase), clients, size)


def _begin(algorithm: Algorithm[S], link: Any, start: Run[S] | None, seed: int, draw: Callable[[At], Tensor]) -> Run[S]:
    """A fresh run after its setup, or the earlier one with setup replayed and not counted again."""
    device = next(iter(parameters(link.handle.module.requires_grad_()).values())).device
    params = {name: leaf.to(device) for name, leaf in parameters(algorithm.model).items()}
    state = algorithm.init(params) if start is None else _to(start.state, device)
    after, _ = drive(algorithm.setup(state), link, seed, 0, draw)
    if start is None:
        return Run(algorithm, after, link.handle, [], link.ledger)
    link.ledger.rows[:] = start.ledger.rows
    return Run(algorithm, state, link.handle, list(start.history), link.ledger)


def _to(state: S, device: torch.device) -> S:
    moved: S = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), state)
    return moved


def one_round(run: Run[S], link: Any, seed: int, number: int, draw: Callable[[At], Tensor]) -> Record:
    """Advance the run by one round and say what happened."""
    begin = time.perf_counter()
    run.state, progress = drive(run.algorithm.round(run.state), link, seed, number, draw)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    moved = run.ledger.total(number)
    return {
        "round": number,
        "cohort": sorted(progress.cohort),
        "up_bytes": moved["up"],
        "down_bytes": moved["down"],
        "seconds": time.perf_counter() - begin,
        "dropped": [drop._asdict() for drop in progress.dropped],
    }


class Judge:
    """Evaluates a run on the test set and, when wanted, on the training set."""

    def __init__(self, federation: Federation, link: Any, train: bool) -> None:
        data, pool = federation.data, link.population
        self.classes = data.classes
        x = data.test_x.to(pool.x.dtype).to(pool.x.device)
        self.sets = {"test": (x, data.test_y.to(pool.x.device))}
        if train:
            self.sets["train"] = (pool.x, pool.y)

    def __call__(self, run: Run[Any]) -> Record:
        record: Record = {}
        for name, (x, y) in self.sets.items():
            found = evaluate(run.algorithm, run.handle, run.state, x, y, self.classes)
            record |= {f"{name}_{key}": value for key, value in found.items()}
        return record


@contextmanager
def exact_float32() -> Iterator[None]:
    """fp32 means fp32: no TF32 in matrix products or convolutions while this runs."""
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn
