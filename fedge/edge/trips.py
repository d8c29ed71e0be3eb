"""Trips: what it takes a client to be sent its models, to train them and to send them back."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedge import tree
from fedge.core import Ask, At
from fedge.edge.devices import Fleet
from fedge.edge.draws import Array
from fedge.edge.work import Work, Workload
from fedge.ledger import payload_bytes


class Trip(NamedTuple):
    """Of what a trip consists, for those who leave on the way.

    `parts` are seconds: before anything moves, receiving, computing, sending; `watts` are those of the last three.
    """

    parts: tuple[float, ...]
    watts: tuple[float, ...]

    def joules_until(self, seconds: float) -> float:
        spent, left = 0.0, max(0.0, seconds - self.parts[0])
        for part, watts in zip(self.parts[1:], self.watts, strict=True):
            spent, left = spent + watts * min(part, left), left - min(part, left)
        return spent

    def crossed(self, seconds: float) -> tuple[float, float]:
        """The shares of what is sent down and up that have arrived."""
        before, down, compute, up = self.parts
        left = max(0.0, seconds - before)
        return _share(left, down), _share(max(0.0, left - down - compute), up)


def _share(seconds: float, whole: float) -> float:
    return min(1.0, seconds / whole) if whole > 0 else 1.0


class Trips:
    """The trips of all clients, worked out when they are first needed; they do not change during a run.

    Columns of plain numbers, by the place of a client: an object per client would be one more for Python's collector
    to look through. `sharing` clients are at work at any time and share the band; fading is drawn once per client.
    """

    def __init__(self, load: Workload, fleet: Fleet, ask: Ask, seed: int, sharing: int) -> None:
        self.load, self.fleet, self.ask, self.at, self.sharing = load, fleet, ask, At(seed, 0, 0), sharing
        self.task = load.tasks[ask.tasks[0]]
        self._places: dict[int, int] = {}
        self.seconds, self.joules = list[float](), list[float]()
        self.down, self.up = list[int](), list[int]()
        self.chance = list[float]()  # that the client is there when it is to be sent out
        self.rows = list[tuple[int, ...]]()  # that the client holds
        self._parts = list[float]()  # seven per client, those of a Trip

    def place(self, client: int) -> int:
        """Where a client stands in the columns."""
        found = self._places.get(client)
        if found is None:
            self.prepare([client])
            found = self._places[client]
        return found

    def __getitem__(self, client: int) -> Trip:
        begin = 7 * self.place(client)
        return Trip(tuple(self._parts[begin : begin + 4]), tuple(self._parts[begin + 4 : begin + 7]))

    def prepare(self, clients: list[int]) -> None:
        """Many at once cost little more than one."""
        new = sorted(set(clients) - self._places.keys())
        if not new:
            return
        ids = np.array(new)
        work, found = self._work(ids), self.fleet.devices(ids)
        down, up = self.fleet.rates(self.at, ids, found, self.sharing)
        watts = np.stack([found.receive_watts, found.compute_watts, found.transmit_watts])
        parts = np.stack([found.latency, 8 * work.down / down, work.flops / found.flops, 8 * work.up / up])
        self.seconds += parts.sum(0).tolist()
        self.joules += (watts * parts[1:]).sum(0).tolist()
        self.down += work.down.astype(np.int64).tolist()
        self.up += work.up.astype(np.int64).tolist()
        self.chance += found.availability.tolist()
        self._parts += np.concatenate([parts, watts]).T.ravel().tolist()
        self.rows += [(0,)] * len(new) if self.task.rows is None else self.load.rows(ids, self.task)
        self._places.update(zip(new, range(len(self._places), len(self.seconds)), strict=True))

    def _work(self, ids: Array) -> Work:
        """The work of all rows that clients hold; the ask is that of one row."""
        if self.task.rows is None:
            return self.load.of(self.ask, ids)
        stacked = {name: tree.map_(lambda leaf: leaf[None], part) for name, part in self.ask.send.items()}
        one = self.load.of(Ask(self.ask.task, stacked), ids)
        return one._replace(down=one.jobs * payload_bytes(self.ask.send))
