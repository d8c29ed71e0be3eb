"""The loop-back link: one client at a time, everything through bytes. The reference, and the debugger."""

from __future__ import annotations

from typing import Any

from fedge.core import Algorithm, Ask, At
from fedge.engine.clients.worker import Worker
from fedge.engine.links import wire
from fedge.engine.links.message_link import Mail, MessageLink, Parts
from fedge.federation import Federation


class Loopback(MessageLink):
    """A link that treats each client as if it were far away: request bytes out, reply bytes back, nothing shared."""

    def __init__(self, algorithm: Algorithm[Any], federation: Federation, **options: Any) -> None:
        if str(options.get("device", "cpu")) != "cpu":
            raise ValueError(f"device is {options['device']!r}, but the loop-back link is for the CPU")
        super().__init__(algorithm, federation, **options)

    def forget(self) -> None:
        super().forget()
        self._workers: dict[int, Worker] = {}

    def exchange(self, at: At, asks: tuple[Ask, ...], requests: dict[int, Parts]) -> dict[int, Mail]:
        mail = {}
        for client, parts in requests.items():
            answers = {position: self.client(client, at, asks[position], blob) for position, blob in parts.items()}
            sizes = [sum(map(len, blobs.values())) for blobs in (parts, answers)]
            mail[client] = Mail(answers, None, *sizes)
        return mail

    def client(self, client: int, at: At, ask: Ask, request: bytes) -> bytes:
        """Everything that happens on a device: bytes in, bytes out."""
        if client not in self._workers:
            chosen = self.population.examples(client)
            x, y = self.population.x[chosen], self.population.y[chosen]
            self._workers[client] = Worker(client, x, y, self.tasks)
        answer = self._workers[client].work(at, ask.tasks, ask.reuse, wire.decode(request))
        return wire.encode(answer)
