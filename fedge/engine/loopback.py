"""The loop-back link: one client at a time, everything through bytes. The reference, and the debugger."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedge import tree
from fedge.core import Algorithm, Ask, At, Drop, Payload, Reply
from fedge.engine import replies, wire
from fedge.engine.collect import Collector
from fedge.engine.ledger import Ledger
from fedge.engine.population import Population
from fedge.engine.worker import Worker
from fedge.federation import Federation
from fedge.handle import Handle, parameters


class Loopback:
    """A link that treats each client as if it were far away: request bytes out, reply bytes back, nothing shared."""

    def __init__(
        self,
        algorithm: Algorithm[Any],
        federation: Federation,
        *,
        min_replies: int = 1,
        max_weight: float = replies.MAX_WEIGHT,
    ) -> None:
        device = torch.device("cpu")
        dtype = next(iter(parameters(algorithm.model).values())).dtype
        self.population = Population(federation, dtype, device)
        self.handle = Handle(algorithm.model, algorithm.loss, device)
        self.tasks = algorithm.tasks(self.handle)
        self.ledger = Ledger()
        self.min_replies, self.max_weight = min_replies, max_weight
        self._workers: dict[int, Worker] = {}
        self._known: Payload = {}  # one row's worth of what the cohort holds
        if (row := self.population.declare(list(self.tasks.values()))) is not None:
            self.ledger.add(row)

    def share(self, at: At, beta: float) -> None:
        self.ledger.add(self.population.share(at, beta))

    @torch.no_grad()
    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> tuple[list[Reply], list[Drop]]:
        if at.phase == 0 or any(ask.cohort == "new" for ask in asks):
            self._workers, self._known = {}, {}
        answers: list[Reply] = []
        dropped: list[Drop] = []
        for ask in asks:
            reply, bad = self._one_ask(at, ask, clients)
            answers.append(reply)
            dropped += bad
        return answers, dropped

    def _one_ask(self, at: At, ask: Ask, clients: Tensor) -> tuple[Reply, list[Drop]]:
        tasks = [self.tasks[name] for name in ask.tasks]
        jobs = self.population.jobs(clients, tasks[0], ask.rows)
        collector = Collector(at, ask, tasks, jobs, self.max_weight)
        self._expect(ask, collector)
        for client, request in collector.requests.items():
            answer = self.client(client, at, ask, wire.encode(request))
            collector.add(client, wire.decode(answer))
        reply, dropped, row = collector.close(self.min_replies)
        self.ledger.add(row)
        return reply, dropped

    def _expect(self, ask: Ask, collector: Collector) -> None:
        one = {n: tree.take(p, 0) if collector.mean.rows else p for n, p in ask.send.items()}
        self._known |= one
        missing = [name for name in ask.reuse if name not in self._known]
        if missing:
            raise ValueError(
                f"task '{ask.tasks[0]}' reuses '{missing[0]}', which this cohort does not hold: send it, or list "
                f"it in the task's `keeps` (held: {sorted(self._known)})"
            )
        self._known |= collector.expect(self._known)

    def client(self, client: int, at: At, ask: Ask, request: bytes) -> bytes:
        """Everything that happens on a device: bytes in, bytes out."""
        if client not in self._workers:
            chosen = self.population.examples(client)
            x, y = self.population.x[chosen], self.population.y[chosen]
            self._workers[client] = Worker(client, x, y, self.tasks)
        answer = self._workers[client].work(at, ask.tasks, ask.reuse, wire.decode(request))
        return wire.encode(answer)
