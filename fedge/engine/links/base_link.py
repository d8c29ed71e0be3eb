"""What the links on this machine have in common: the population, the tasks on a handle, the ledger, the phases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedge.checks import at_least_one, choice, nearest, positive
from fedge.core import Algorithm, Ask, At, Drop, Reply, Task
from fedge.engine.clients.population import Population
from fedge.engine.hardware.budget import useful_threads
from fedge.engine.hardware.device import place
from fedge.engine.ranks.process_group import Group
from fedge.engine.uploads import replies
from fedge.federation import Federation
from fedge.handle import Handle, parameters
from fedge.ledger import Ledger

Precision = Literal["fp32", "tf32", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


def check_precision(precision: str, device: torch.device) -> None:
    choice("precision", precision, PRECISIONS)
    if precision != "fp32" and device.type != "cuda":
        raise ValueError(f"precision is {precision!r}, which is for CUDA devices: use 'fp32' on {device}")


class LocalLink(ABC):
    """A link whose clients are simulated here."""

    group = Group()

    def __init__(
        self,
        algorithm: Algorithm[Any],
        federation: Federation,
        *,
        device: torch.device | str = "cpu",
        precision: Precision = "fp32",
        min_replies: int = 1,
        max_weight: float = replies.MAX_WEIGHT,
    ) -> None:
        self.algorithm, self.precision, self.device = algorithm, precision, place(device)
        check_precision(precision, self.device)
        at_least_one("min_replies", min_replies)
        positive("max_weight", max_weight)
        self.min_replies, self.max_weight = min_replies, max_weight
        dtype = next(iter(parameters(algorithm.model).values())).dtype
        self.population = Population(federation, dtype, self.device)
        self.handle = self.make_handle(algorithm)
        self.threads = self.judges = 1 if self.device.type == "cuda" else useful_threads(self.handle)
        self.tasks = algorithm.tasks(self.handle)
        self.ledger = Ledger()
        self.forget()
        if (row := self.population.declare(list(self.tasks.values()))) is not None:
            self.ledger.add(row)

    def make_handle(self, algorithm: Algorithm[Any]) -> Handle:
        return Handle(algorithm.model, algorithm.loss, self.device)

    @torch.no_grad()
    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> tuple[list[Reply], list[Drop]]:
        if at.phase == 0 or any(ask.cohort == "new" for ask in asks):
            self.forget()
        answers: list[Reply] = []
        dropped: list[Drop] = []
        jobs = 0
        for reply, bad, done in self.all_asks(at, asks, clients):
            answers.append(reply)
            dropped += bad
            jobs += done
        if jobs:  # none: nobody holds what was asked for
            replies.require(jobs - len(dropped), self.min_replies, asks[0].tasks[0], dropped)
        return answers, dropped

    def all_asks(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> list[tuple[Reply, list[Drop], int]]:
        """The asks of a phase, one after another."""
        return [self.one_ask(at, ask, clients) for ask in asks]

    def named(self, ask: Ask) -> list[Task]:
        """The tasks of an ask; one that the algorithm does not have is an error that lists those it has."""
        for name in ask.tasks:
            if name not in self.tasks:
                known = list(self.tasks)
                raise ValueError(f"the algorithm asks for a task {name!r}{nearest(name, known)}; it has {known}")
        return [self.tasks[name] for name in ask.tasks]

    def share(self, at: At, beta: float) -> None:
        self.ledger.add(self.population.share(at, beta))

    def settings(self) -> dict[str, Any]:
        """Choices that change the order of sums; a run that goes on makes them again."""
        return {"threads": self.threads, "ranks": self.group.size}

    def restore(self, settings: dict[str, Any]) -> None:
        if settings.get("ranks", 1) == self.group.size:  # else sums are in another order anyhow
            self.threads = settings["threads"]

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within it torch uses the threads that suit the model, and fp32 means fp32: no TF32 unless asked for.

        Attention is computed by its formula: the fused kernels cannot be vectorised over clients.
        """
        threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
        cudnn = torch.backends.cudnn.allow_tf32
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision("highest" if self.precision == "fp32" else "high")
        torch.backends.cudnn.allow_tf32 = self.precision != "fp32"
        try:
            with sdpa_kernel(SDPBackend.MATH):
                yield
        finally:
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(matmul)
            torch.backends.cudnn.allow_tf32 = cudnn

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Within it the model is evaluated: with all threads that suit it, because no worker is at work meanwhile."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.judges)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    @abstractmethod
    def forget(self) -> None:
        """A new cohort holds nothing yet."""

    @abstractmethod
    def one_ask(self, at: At, ask: Ask, clients: Tensor) -> tuple[Reply, list[Drop], int]:
        """Carry one ask to the clients; returns also how many jobs it was."""
