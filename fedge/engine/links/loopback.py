"""The loop-back link: one client at a time, everything through bytes. The reference, and the debugger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedge.core import Algorithm, Ask, At, Examples, Share
from fedge.engine.clients.directory import Directory
from fedge.engine.clients.memory import ClientMemory, Job
from fedge.engine.clients.population import Population
from fedge.engine.clients.worker import Worker
from fedge.engine.links import wire
from fedge.engine.links.base_link import Replies
from fedge.engine.links.message_link import Mail, MessageLink, Parts
from fedge.engine.runtime import plain_runtime
from fedge.federation import Federation

CPU = torch.device("cpu")


class Loopback(MessageLink):
    """A link that treats each client as remote: request bytes out, reply bytes back, nothing shared."""

    def __init__(self, algorithm: Algorithm[Any], federation: Federation, **options: Any) -> None:
        if str(device := options.pop("device", "cpu")) != "cpu":
            raise ValueError(f"device is {device!r}, but the loop-back link is for the CPU")
        runtime = plain_runtime(algorithm, federation)
        self.population = Population(federation, runtime.dtype, CPU)
        self.memory = ClientMemory(CPU)
        directory = Directory(federation.clients, self.population.rows_of, self.population.sizes)
        super().__init__(algorithm, runtime, directory, **options)

    def forget(self) -> None:
        super().forget()
        self._workers: dict[int, Worker] = {}

    def ask(self, at: At, asks: tuple[Ask, ...], clients: torch.Tensor) -> Replies:
        self.memory.begin(at)
        return super().ask(at, asks, clients)

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
            self._workers[client] = Worker(client, *self.population.of(client), self.tasks, self.memory)
        limits = None if ask.limits is None else ask.limits.get(client)
        answer = self._workers[client].work(at, ask.tasks, ask.reuse, wire.decode(request), limits)
        return wire.encode(answer)

    def void(self, at: At, jobs: list[Job]) -> None:
        self.memory.void(at, jobs)

    def share(self, at: At, wanted: Share) -> Examples:
        self.ledger.add(self.population.share(at, wanted))
        return self.population.examples_shared()

    def remembered(self, round: int) -> dict[str, Any]:
        self.memory.settle(round)
        return self.memory.state()

    def remember(self, memory: Mapping[str, Any]) -> None:
        self.memory.load(memory)

    def abandon(self, round: int, phase: int | None = None) -> None:
        self.memory.abandon(round, phase)

    def memory_bytes(self) -> int:
        return self.memory.nbytes
