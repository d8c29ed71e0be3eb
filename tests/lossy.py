"""Links around links, for tests: one that loses answers, one that is slow, one that writes down what passes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch import Tensor

from fedge.core import Ask, At, Drop
from fedge.engine import Around, BaseLink
from fedge.engine.links.base_link import Replies


class Lossy(Around):
    """Clients that are lost in a round and a task are never asked, and named."""

    def __init__(self, inner: BaseLink, lost: set[tuple[int, str, int]], why: str = "lost on the way") -> None:
        super().__init__(inner)
        self.lost, self.why = lost, why  # (round, first task of the phase, client)

    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Replies:
        task = asks[0].tasks[0]
        gone = [client for client in clients.tolist() if (at.round, task, client) in self.lost]
        kept = clients[[client not in gone for client in clients.tolist()]]
        replies, dropped = self.inner.ask(at, asks, kept)
        return replies, [*dropped, *(Drop(client, task, self.why) for client in gone)]


class Slow(Around):
    """Every phase takes longer."""

    def __init__(self, inner: BaseLink, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds

    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Replies:
        time.sleep(self.seconds)
        return self.inner.ask(at, asks, clients)

    def notes(self) -> dict[str, float]:
        return {**self.inner.notes(), "delay": self.seconds}


@dataclass
class Recording(Around):
    """Writes down the address, the tasks and the clients of every phase."""

    inner: BaseLink
    seen: list[tuple[At, tuple[str, ...], list[int]]] = field(default_factory=list)

    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Replies:
        self.seen.append((at, tuple(name for ask in asks for name in ask.tasks), clients.tolist()))
        return self.inner.ask(at, asks, clients)
