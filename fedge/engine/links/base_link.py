"""What training needs of a link: the two ways to reach clients, and a few things that go into the record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from fedge.checks import nearest
from fedge.core import Algorithm, Ask, At, Drop, Examples, Progress, Reply, Share, Task
from fedge.engine.runtime import Runtime
from fedge.ledger import Ledger, Row

Replies = tuple[list[Reply], list[Drop]]


class BaseLink(ABC):
    """`ask` and `share` carry everything; the rest has defaults that suit a link without a state of its own."""

    algorithm: Algorithm[Any]
    runtime: Runtime  # what the server computes with
    ledger: Ledger  # what crossed, in bytes
    min_replies: int = 1  # clients that have to answer well in a phase, else the round is skipped

    @abstractmethod
    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Replies:
        """Carry one phase to these clients; the replies, one per ask, and whose answers do not count."""

    @abstractmethod
    def share(self, at: At, wanted: Share) -> Examples:
        """Give every client examples of the global pool; what was drawn, for the server."""

    def begin(self, rows: Iterable[Row]) -> None:
        """A run begins, or goes on after these bytes; a link may serve several runs, one after another."""
        self.ledger = Ledger(list(rows))

    def notes(self) -> dict[str, Any]:
        """What the link has to say about the round, for its record."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Choices that change the order of sums; a run that goes on makes them again."""
        return {}

    def restore(self, settings: Mapping[str, Any]) -> None:
        """Make the choices of `settings` again."""
        return None

    def remembered(self, round: int) -> dict[str, Any]:
        """What clients remember after this round, for a checkpoint, as far as the link has it."""
        return {}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Let clients remember what `remembered` gave."""
        return None

    def abandon(self, round: int, phase: int | None = None) -> None:
        """The server stays as it was before this round, or this phase: clients are to forget what they kept in it."""
        return None

    def remembers_elsewhere(self) -> bool:
        """Whether `remembered` has to ask other processes, which may be gone."""
        return False

    def memory_bytes(self) -> int | None:
        """What clients remember takes so many bytes; None where the link does not know."""
        return 0

    def stopping(self, stop: Callable[[], bool] | None) -> Callable[[], bool]:
        """`stop` as all processes behind this link see it."""
        return stop or (lambda: False)

    def advance(self, state: Any, seed: int, round: int, size: int) -> tuple[Any, Progress] | None:
        """The state after a round in which nobody is waited for; None: the round is a flow of asks."""
        return None

    def choosing(self, clients: int, size: int) -> Callable[[At], Tensor] | None:
        """How cohorts of a size are chosen, as a function of the address alone; None: evenly."""
        return None

    def about(self) -> dict[str, Any]:
        """What the link knows of the clients, for the run folder."""
        return {}

    def working(self) -> AbstractContextManager[None]:
        """Within it rounds are done."""
        return self.runtime.working()


class Around(BaseLink):
    """A link around a link: everything is the inner link's, until a subclass says otherwise."""

    def __init__(self, inner: BaseLink) -> None:
        self.inner = inner

    @property
    def algorithm(self) -> Algorithm[Any]:  # type: ignore[override]
        return self.inner.algorithm

    @property
    def runtime(self) -> Runtime:  # type: ignore[override]
        return self.inner.runtime

    @property
    def ledger(self) -> Ledger:  # type: ignore[override]
        return self.inner.ledger

    @property
    def min_replies(self) -> int:  # type: ignore[override]
        return self.inner.min_replies

    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Replies:
        return self.inner.ask(at, asks, clients)

    def share(self, at: At, wanted: Share) -> Examples:
        return self.inner.share(at, wanted)

    def begin(self, rows: Iterable[Row]) -> None:
        self.inner.begin(rows)

    def notes(self) -> dict[str, Any]:
        return self.inner.notes()

    def settings(self) -> dict[str, Any]:
        return self.inner.settings()

    def restore(self, settings: Mapping[str, Any]) -> None:
        self.inner.restore(settings)

    def remembered(self, round: int) -> dict[str, Any]:
        return self.inner.remembered(round)

    def remember(self, memory: Mapping[str, Any]) -> None:
        self.inner.remember(memory)

    def abandon(self, round: int, phase: int | None = None) -> None:
        self.inner.abandon(round, phase)

    def remembers_elsewhere(self) -> bool:
        return self.inner.remembers_elsewhere()

    def memory_bytes(self) -> int | None:
        return self.inner.memory_bytes()

    def stopping(self, stop: Callable[[], bool] | None) -> Callable[[], bool]:
        return self.inner.stopping(stop)

    def advance(self, state: Any, seed: int, round: int, size: int) -> tuple[Any, Progress] | None:
        return self.inner.advance(state, seed, round, size)

    def choosing(self, clients: int, size: int) -> Callable[[At], Tensor] | None:
        return self.inner.choosing(clients, size)

    def about(self) -> dict[str, Any]:
        return self.inner.about()

    def working(self) -> AbstractContextManager[None]:
        return self.inner.working()


def named(tasks: Mapping[str, Task], ask: Ask) -> list[Task]:
    """The tasks of an ask; one that the algorithm does not have is an error that lists those it has."""
    for name in ask.tasks:
        if name not in tasks:
            known = list(tasks)
            raise ValueError(f"the algorithm asks for a task {name!r}{nearest(name, known)}; it has {known}")
    return [tasks[name] for name in ask.tasks]


def begins_anew(at: At, asks: tuple[Ask, ...]) -> bool:
    """Whether this phase has a cohort that holds nothing yet."""
    return at.phase == 0 or any(ask.cohort == "new" for ask in asks)
