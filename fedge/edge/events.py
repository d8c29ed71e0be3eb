"""Asynchronous training, event by event in virtual time.

`cohort` clients are at work at any time. When one answers, its jobs go into the buffers of their rows; a full buffer
moves its row; then another client is sent the newest versions. Everything is a function of the address: dispatch j is
client `draw(seed, j)`, its batches are those of round j + 1. When things happen does not depend on the models, so
tensors are computed as late as possible and all together: the first upload that is needed brings everything under way
with it, and the server's steps are taken many at a time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedge import tree
from fedge.algorithms.asynchronous import Arrivals, Asynchronous
from fedge.core import Drop, Params, Payload, Progress
from fedge.edge.devices import Fleet
from fedge.edge.draws import Array, exponential
from fedge.edge.jobs import Stack, Versioned, as_tensor
from fedge.edge.trips import Trip, Trips
from fedge.edge.underway import Job, Underway
from fedge.edge.work import Workload
from fedge.engine.simulator import Simulator
from fedge.engine.uploads import checks
from fedge.keys import CLIENT, DISPATCH, LEAVING, choose, fold, fold_array
from fedge.ledger import Row

BLOCK = 256  # dispatches drawn at a time
STEPS = 128  # of the server, at most, that are taken at a time
POSITIVE = (1 << 62) - 1


class Spending(NamedTuple):
    """What a round of events cost, for its record."""

    seconds: float
    joules: float
    steps: int
    staleness: float


class Events:
    """Advances an asynchronous algorithm by so many answers."""

    def __init__(
        self,
        algorithm: Asynchronous,
        simulator: Simulator,
        load: Workload,
        fleet: Fleet,
        clients: int,
        stay: float | None = None,
    ) -> None:
        self.algorithm, self.simulator, self.load, self.fleet = algorithm, simulator, load, fleet
        self.clients, self.stay = clients, stay
        for name, task in load.tasks.items():
            if task.remembers or task.codec is not None or task.draws:
                raise ValueError(f"task '{name}' remembers, encodes or draws, which asynchronous training does not")
        self._drawn: tuple[int, list[int], list[float]] = (-1, [], [])  # block, candidates, times to stay
        self._trips: Trips | None = None
        self._stack: Stack | None = None

    # One round

    def advance(self, state: dict[str, Any], seed: int, round: int, size: int) -> tuple[Any, Progress, Row, Spending]:
        """The state after `size` more answers, who answered, the bytes that moved, and what it took."""
        self.seed, self.size, self.models = seed, size, list(state["models"])
        self._due = dict[int, list[list[Job]]]()  # by row: full buffers whose steps are to be taken
        self._wanted = set[tuple[int, int]]()  # (row, version) that were sent out and are not computed yet
        ask = self.algorithm.asks(self.models[0])
        self.tasks, self.down, self._steps, self._ago = ask.tasks, 0, 0, list[int]()
        if self._trips is None or (seed, size) != (self._trips.at.seed, self._trips.sharing):
            self._trips = Trips(self.load, self.fleet, ask, seed, size)
            self._drawn = (-1, [], [])
        self.trips = self._trips
        first = state["events"] is None
        self.going = Underway() if first else Underway.read(state["events"])
        self._busy = {flight[2] for flight in self.going.flights}
        self._idle = sorted(set(range(self.clients)) - self._busy) if 2 * size > self.clients else None
        if first:
            self._begin()
        begin, joules, up, progress = self.going.now, 0.0, 0, Progress()
        for _ in range(size):
            spent, sent_up = self._event(progress)
            joules, up = joules + spent, up + sent_up
        self._step()
        row = Row(round, 0, "+".join(self.tasks), size, self.down, self.down, up)
        mean = sum(self._ago) / len(self._ago) if self._ago else 0.0
        spending = Spending(self.going.now - begin, joules, self._steps, mean)
        return {"models": self.models, "events": self.going.plain()}, progress, row, spending

    def _begin(self) -> None:
        rows = self.algorithm.rows or 1
        self.going.versions, self.going.buffers = [0] * rows, [[] for _ in range(rows)]
        first = choose(fold(self.seed, DISPATCH), self.clients, self.size).tolist()
        self.trips.prepare(first)
        for client in first:
            self._dispatch(client)

    def _event(self, progress: Progress) -> tuple[float, int]:
        """The next client answers or leaves, and another one is sent out: joules, and bytes up."""
        events = self.going
        events.now, number, client, answers, taken = heappop(events.flights)
        trip = self.trips[client]
        self._busy.discard(client)
        progress.cohort.add(client)
        if self._idle is not None:
            insort(self._idle, client)
        if answers:
            self._answer(number, trip, progress)
        else:
            progress.dropped.append(Drop(client, self.tasks[0], f"left after {taken:.3g} s"))
            self._forget([(number, row) for row in trip.rows])
        self._dispatch(self._next())
        return (trip.joules, trip.up) if answers else (trip.joules_until(taken), 0)

    def _answer(self, number: int, trip: Trip, progress: Progress) -> None:
        for row in trip.rows:
            buffer = self.going.buffers[row]
            buffer.append((number, row))
            if len(buffer) >= self.algorithm.buffer:
                progress.dropped += self._move(row)

    # Sending out

    def _dispatch(self, client: int) -> None:
        events, trip = self.going, self.trips[client]
        number, events.number = events.number, events.number + 1
        for row in trip.rows:
            version = events.versions[row]
            events.untrained[(number, row)] = (client, version)
            if (row, version) not in events.sent:
                self._wanted.add((row, version))
        stays = np.inf if self.stay is None else self.stay * self._draws(number)[1]
        taken = min(trip.seconds, stays)
        self._busy.add(client)
        if self._idle is not None:
            del self._idle[bisect_left(self._idle, client)]
        self.down += trip.down
        heappush(events.flights, (events.now + taken, number, client, stays >= trip.seconds, taken))

    def _next(self) -> int:
        """The client of the next dispatch: any that is not at work, by address."""
        key = self._draws(self.going.number)[0]
        if self._idle is not None:
            return self._idle[key % len(self._idle)]
        while key % self.clients in self._busy:
            key = fold(key, 0) & POSITIVE
        return key % self.clients

    def _draws(self, number: int) -> tuple[int, float]:
        """A key for the client of a dispatch, and its time to stay over the mean."""
        block, place = divmod(number, BLOCK)
        if block != self._drawn[0]:
            numbers = np.arange(block * BLOCK, (block + 1) * BLOCK)
            keys: Array = fold_array(fold(self.seed, DISPATCH), numbers) & np.uint64(POSITIVE)
            self._drawn = (block, keys.tolist(), exponential(fold(self.seed, LEAVING), numbers).tolist())
            again = fold_array(keys, 0) & np.uint64(POSITIVE)  # where the first is at work
            self.trips.prepare([key % self.clients for key in (*self._drawn[1], *again.tolist())])
        return self._drawn[1][place], self._drawn[2][place]

    # The server's steps

    def _move(self, row: int) -> list[Drop]:
        """A full buffer moves its row, sooner or later; uploads that are not finite are dropped."""
        events = self.going
        jobs, events.buffers[row] = events.buffers[row], []
        if any(job in events.untrained for job in jobs):
            self._train()
        bad = [job for job in jobs if not events.batches[events.places[job][0]][3][events.places[job][1]]]
        dropped = [Drop(events.started[job][0], self.tasks[0], "its upload is not finite") for job in bad]
        self._forget(bad)
        good = [job for job in jobs if job not in bad] if bad else jobs
        if good:
            self._due.setdefault(row, []).append(good)
            self._ago += [events.versions[row] - events.started[job][1] for job in good]
            self._steps += 1
            events.versions[row] += 1
            if len(self._due[row]) >= STEPS:
                self._step()
        return dropped

    def _step(self) -> None:
        """Take the steps that are due, and keep the versions that were sent out."""
        events = self.going
        for row, groups in self._due.items():
            first = events.versions[row] - len(groups)
            self._keep(row, first)
            kept = [at for at in range(len(groups)) if (row, first + at + 1) in self._wanted]
            for at, model in self._after(row, groups, first, kept):
                self.models[row] = model
                self._keep(row, first + at + 1)
            self._forget([job for jobs in groups for job in jobs])
        for row, version in list(self._wanted):  # of rows that did not move
            self._keep(row, version)
        self._due = {}

    def _keep(self, row: int, version: int) -> None:
        """The row's model is of this version now: jobs that started from it will need it."""
        if (row, version) in self._wanted:
            self._wanted.discard((row, version))
            self.going.sent[(row, version)] = self.algorithm.sends(self.models[row])

    def _after(self, row: int, groups: list[list[Job]], first: int, kept: list[int]) -> Iterator[tuple[int, Any]]:
        """The row's model after these of its steps, and after the last."""
        if not self.algorithm.adds_up:
            for at, jobs in enumerate(groups):
                yield at, self.algorithm.moved(self.models[row], self._arrivals(jobs, [first + at] * len(jobs))[0])
            return
        model, last = self.models[row], len(groups) - 1
        taken = kept if last in kept else [*kept, last]
        ages = [first + at for at, jobs in enumerate(groups) for _ in jobs]
        arrivals, order = self._arrivals([job for jobs in groups for job in jobs], ages)
        back = np.argsort(order)
        mixing = self.algorithm.mixing(list(map(len, groups)), arrivals.weights[back], arrivals.staleness[back])
        stacked = self.algorithm.after(model, arrivals, torch.from_numpy(mixing[taken][:, order]))
        leaves = [leaf.unbind() for leaf in stacked.values()]
        for at, *mine in zip(taken, *leaves, strict=True):
            yield at, {**model, "params": dict(zip(stacked, mine, strict=True))}

    def _train(self) -> None:
        """Compute everything that is under way, in one stack."""
        self._step()
        events = self.going
        jobs = list(events.untrained)
        clients = as_tensor([client for client, _ in events.untrained.values()])
        numbers, rows = np.array(jobs).T
        keys = fold_array(fold_array(fold_array(fold(self.seed, CLIENT), numbers + 1), 0), clients.numpy())
        known = {key: place for place, key in enumerate(events.sent)}
        index = as_tensor([known[(job[1], version)] for job, (_, version) in events.untrained.items()])
        sent = _taken(list(events.sent.values()), index)
        if self._stack is None:
            self._stack = Stack(self.simulator, self.tasks)
        there = torch.from_numpy(np.ascontiguousarray(rows))
        upload, weights = self._stack.fold(Versioned(clients, there, torch.from_numpy(keys.view(np.int64)), sent))
        good = checks.finite_jobs(upload, torch.isfinite(weights) & (weights > 0))
        if not bool(good.all()):  # a state holds finite numbers alone
            upload = {name: tree.map_(lambda leaf: _without(leaf, good), part) for name, part in upload.items()}
        batch = max(events.batches, default=-1) + 1
        start = sent["params"] if self.algorithm.needs_start else {}
        events.batches[batch], events.needed[batch] = (upload, weights, start, good.tolist()), len(jobs)
        for place, job in enumerate(jobs):
            events.places[job] = (batch, place)
        events.started |= events.untrained
        events.untrained, events.sent = {}, {}

    def _arrivals(self, jobs: list[Job], versions: list[int]) -> tuple[Arrivals, Array]:
        """The uploads of jobs, which meet these versions of their row; by batch, and so which job is at each place."""
        events, groups = self.going, dict[int, list[int]]()
        for at, job in enumerate(jobs):
            groups.setdefault(events.places[job][0], []).append(at)
        parts = [
            _picked(events.batches[batch], as_tensor([events.places[jobs[at]][1] for at in some]))
            for batch, some in groups.items()
        ]
        order = [at for some in groups.values() for at in some]
        upload = {name: _cat([part[0][name] for part in parts]) for name in parts[0][0]}
        ago = as_tensor([versions[at] - events.started[jobs[at]][1] for at in order])
        weights, start = torch.cat([part[1] for part in parts]), _cat([part[2] for part in parts])
        return Arrivals(upload, start, weights, ago), np.array(order)

    def _forget(self, jobs: list[Job]) -> None:
        events = self.going
        for job in jobs:
            events.untrained.pop(job, None)
            events.started.pop(job, None)
            if job in events.places:
                batch, _ = events.places.pop(job)
                events.needed[batch] -= 1
                if not events.needed[batch]:
                    del events.batches[batch], events.needed[batch]


def _without(leaf: Tensor, good: Tensor) -> Tensor:
    """Zeros in place of what is not good."""
    return torch.where(good.view(-1, *[1] * (leaf.dim() - 1)), leaf, torch.zeros_like(leaf))


def _picked(batch: tuple[Payload, Tensor, Params, Any], places: Tensor) -> tuple[Payload, Tensor, Params]:
    upload, weights, start, _ = batch
    there = places.to(weights.device)
    parts = {name: tree.map_(lambda leaf: leaf[there], part) for name, part in upload.items()}
    return parts, weights[there], tree.map_(lambda leaf: leaf[there], start)


def _cat(parts: list[Params]) -> Params:
    return parts[0] if len(parts) == 1 else tree.map_(lambda *leaves: torch.cat(leaves), *parts)


def _taken(sent: list[Payload], index: Tensor) -> Payload:
    """What every job was sent, [J, ...], of the versions there are."""
    stacked = {name: tree.stack([one[name] for one in sent]) for name in sent[0]}
    return {name: tree.map_(lambda leaf: leaf[index.to(leaf.device)], part) for name, part in stacked.items()}
