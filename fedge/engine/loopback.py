"""The loop-back link: one client at a time, everything through bytes. The reference, and the debugger."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedge import tree
from fedge.core import Algorithm, Ask, At, Drop, Payload, Reply
from fedge.engine import replies, wire
from fedge.engine.collect import Collector
from fedge.engine.local import LocalLink
from fedge.engine.worker import Worker
from fedge.federation import Federation


class Loopback(LocalLink):
    """A link that treats each client as if it were far away: request bytes out, reply bytes back, nothing shared."""

    def __init__(self, algorithm: Algorithm[Any], federation: Federation, **options: Any) -> None:
        if str(options.get("device", "cpu")) != "cpu":
            raise ValueError(f"device is {options['device']!r}, but the loop-back link is for the CPU")
        super().__init__(algorithm, federation, **options)

    def forget(self) -> None:
        self._workers: dict[int, Worker] = {}
        self._known: Payload = {}  # one row's worth of what the cohort holds

    def one_ask(self, at: At, ask: Ask, clients: Tensor) -> tuple[Reply, list[Drop], int]:
        tasks = self.named(ask)
        jobs = self.population.jobs(clients, tasks[0], ask.rows)
        collector = Collector(at, ask, tasks, jobs, self.max_weight)
        self._expect(ask, collector)
        for client, request in collector.requests.items():
            answer = self.client(client, at, ask, wire.encode(request))
            collector.add(client, wire.decode(answer))
        reply, dropped, row = collector.close()
        self.ledger.add(row)
        return reply, dropped, len(jobs.clients)

    def _expect(self, ask: Ask, collector: Collector) -> None:
        one = {n: tree.take(p, 0) if collector.mean.rows else p for n, p in ask.send.items()}
        self._known |= one
        replies.require_held(ask.tasks[0], ask.reuse, self._known)
        self._known |= collector.expect(self._known)

    def client(self, client: int, at: At, ask: Ask, request: bytes) -> bytes:
        """Everything that happens on a device: bytes in, bytes out."""
        if client not in self._workers:
            chosen = self.population.examples(client)
            x, y = self.population.x[chosen], self.population.y[chosen]
            self._workers[client] = Worker(client, x, y, self.tasks)
        answer = self._workers[client].work(at, ask.tasks, ask.reuse, wire.decode(request))
        return wire.encode(answer)
