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
    """Seconds, joules, bytes, the rows that the client holds; and for those who leave on the way, of what it consists.

    `parts` are seconds: before anything moves, receiving, computing, sending; `watts` are those of the last three.
    """

    seconds: float
    joules: float
    down: int
    up: int
    rows: tuple[int, ...]
    parts: tuple[float, ...]
    watts: tuple[float, ...]

    def joules_until(self, seconds: float) -> float:
        spent, left = 0.0, max(0.0, seconds - self.parts[0])
        for part, watts in zip(self.parts[1:], self.watts, strict=True):
            spent, left = spent + watts * min(part, left), left - min(part, left)
        return spent


class Trips:
    """The trips of all clients, worked out when they are first needed; they do not change during a run.

    `sharing` clients are at work at any time and share the band; fading is drawn once per client.
    """

    def __init__(self, load: Workload, fleet: Fleet, ask: Ask, seed: int, sharing: int) -> None:
        self.load, self.fleet, self.ask, self.at, self.sharing = load, fleet, ask, At(seed, 0, 0), sharing
        self.task = load.tasks[ask.tasks[0]]
        self._known: dict[int, Trip] = {}

    def __getitem__(self, client: int) -> Trip:
        if client not in self._known:
            self.prepare([client])
        return self._known[client]

    def prepare(self, clients: list[int]) -> None:
        """Many at once cost little more than one."""
        new = sorted(set(clients) - self._known.keys())
        if not new:
            return
        ids = np.array(new)
        work, found = self._work(ids), self.fleet.devices(ids)
        down, up = self.fleet.rates(self.at, ids, found, self.sharing)
        watts = np.stack([found.receive_watts, found.compute_watts, found.transmit_watts])
        parts = np.stack([found.latency, 8 * work.down / down, work.flops / found.flops, 8 * work.up / up])
        columns = (parts.sum(0), (watts * parts[1:]).sum(0), work.down, work.up)
        numbers = zip(*(column.tolist() for column in columns), strict=True)
        shares = zip(map(tuple, parts.T.tolist()), map(tuple, watts.T.tolist()), strict=True)
        for client, (seconds, joules, sent, back), two in zip(new, numbers, shares, strict=True):
            rows = (0,) if self.task.rows is None else tuple(self.load.directory.rows(client, self.task))
            self._known[client] = Trip(seconds, joules, int(sent), int(back), rows, *two)

    def _work(self, ids: Array) -> Work:
        """The work of all rows that clients hold; the ask is that of one row."""
        if self.task.rows is None:
            return self.load.of(self.ask, ids)
        stacked = {name: tree.map_(lambda leaf: leaf[None], part) for name, part in self.ask.send.items()}
        one = self.load.of(Ask(self.ask.task, stacked), ids)
        return one._replace(down=one.jobs * payload_bytes(self.ask.send))
