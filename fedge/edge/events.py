"""Asynchronous training, event by event in virtual time.

`cohort` clients are at work at any time. When one answers, its jobs go into the buffers of their rows; a full buffer
moves its row; then another client is sent the newest versions, one that is available: client k is with the chance a_k,
drawn anew whenever the server looks. If nobody else is, the place stays free until the next answer.

Everything is a function of the address: dispatch j is client `draw(seed, j)`, its batches are those of round j + 1.
When things happen does not depend on the models, so tensors are computed as late as possible and all together: the
first upload that is needed brings everything under way with it, and the server's steps are taken many at a time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedge import tree
from fedge.algorithms.asynchronous import Arrivals, Asynchronous
from fedge.core import Drop, Progress
from fedge.edge.devices import Fleet
from fedge.edge.draws import Array, exponential, is_below, uniform
from fedge.edge.jobs import Stack, Versioned
from fedge.edge.judge import Judge
from fedge.edge.shelf import Shelf
from fedge.edge.steps import Due, Plan, plan, stepped
from fedge.edge.trips import Trips
from fedge.edge.underway import Underway
from fedge.edge.work import Workload
from fedge.engine.clients.directory import Jobs
from fedge.engine.simulator import Simulator
from fedge.engine.uploads import checks
from fedge.keys import AVAILABLE, CLIENT, DISPATCH, LEAVING, choose, fold, fold_array
from fedge.ledger import Row

BLOCK = 256  # dispatches drawn at a time
STEPS = 128  # of a row, at most, that are taken at a time
AT_ONCE = 1 << 28  # bytes of uploads that are gathered at a time, for several rows
TRIES = 1000  # clients that are drawn for a free place, at most
LOOKS = 1000  # for somebody who is available, when nobody is at work
POSITIVE = (1 << 62) - 1
START, ABOUT = "(start)", "(about)"  # on the shelf beside the parts of an upload: what it started from, and its weight


class Spending(NamedTuple):
    """What a round of events cost, for its record."""

    seconds: float
    joules: float
    steps: int
    staleness: float
    good: int  # answers that count


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
        self.clients, self.stay, self.rows = clients, stay, algorithm.rows or 1
        for name, task in load.tasks.items():
            if task.remembers or task.codec is not None or task.draws:
                raise ValueError(f"task '{name}' remembers, encodes or draws, which asynchronous training does not")
        self._drawn: tuple[int, list[int], list[float]] = (-1, [], [])  # block, candidates, times to stay
        self._trips: Trips | None = None
        self._stack: Stack | None = None
        self._chances: Array | None = None  # of all clients to be available; None: not looked at yet

    # One round

    def advance(self, state: dict[str, Any], seed: int, round: int, size: int) -> tuple[Any, Progress, Row, Spending]:
        """The state after `size` more answers, who answered, the bytes that moved, and what it took.

        After rounds that did not count the server sends everybody out anew: who was under way then is not waited for.
        """
        self.seed, self.size, self.models = seed, size, list(state["models"])
        self._due = dict[int, Due]()  # by row: full buffers whose steps are to be taken
        self._wanted = set[int]()  # versions that were sent out and are not computed yet
        ask = self.algorithm.asks(self.models[0])
        self.tasks, self.down, self._steps, self._ago, self._counted = ask.tasks, 0, 0, 0, 0
        self._answered, self._bad = (
            dict[int, int](),
            list[Drop](),
        )  # jobs not known to be bad, by dispatch; and bad ones
        if self._trips is None or (seed, size) != (self._trips.at.seed, self._trips.sharing):
            self._trips = Trips(self.load, self.fleet, ask, seed, size)
            self._drawn = (-1, [], [])
        self.trips = self._trips
        first = state["events"] is None
        self.going = Underway() if first else Underway.read(state["events"], round)
        self._busy = {flight[2] for flight in self.going.flights}
        self._idle = sorted(set(range(self.clients)) - self._busy) if 2 * size > self.clients else None
        if first:
            self.going.versions, self.going.buffers = [0] * self.rows, [[] for _ in range(self.rows)]
        if (skipped := round - 1 - self.going.round) > 0:
            self._anew(skipped)
        elif first:
            self._begin()
        begin, joules, up, progress = self.going.now, 0.0, 0, Progress()
        for _ in range(size):
            spent, sent_up = self._event(progress)
            joules, up = joules + spent, up + sent_up
        self._step()
        self.going.round = round
        progress.dropped += self._bad
        row = Row(round, 0, "+".join(self.tasks), size, self.down, self.down, up)
        spending = Spending(
            self.going.now - begin, joules, self._steps, self._ago / max(1, self._counted), self._good()
        )
        return {"models": self.models, "events": self.going.plain()}, progress, row, spending

    def _good(self) -> int:
        """How many answers count; those that wait in buffers do, unless all that were looked at are bad."""
        return sum(map(bool, self._answered.values())) if self._steps or not self._bad else 0

    def require(self, good: int, dropped: list[Drop]) -> None:
        """Answers of too few clients are an error, as those of a cohort are."""
        if dropped and not self._answered:
            why = f"all {self.size} clients left before they had answered (stay = {self.stay} s): allow more time"
            raise checks.TooFewReplies(why, dropped)
        checks.require(good, self.simulator.min_replies, self.tasks[0], dropped)

    def _anew(self, skipped: int) -> None:
        """Nobody is under way any more, and the dispatches of the rounds that did not count are used up."""
        events, trips = self.going, self.trips
        for _, number, client, *_ in events.flights:
            self._forget([number * self.rows + row for row in trips.rows[trips.place(client)]])
        events.flights, events.number, self._busy = [], events.number + skipped * self.size, set()
        self._idle = None if self._idle is None else list(range(self.clients))
        self._fill(events.number)

    def _begin(self) -> None:
        first = choose(fold(self.seed, DISPATCH), self.clients, self.size).tolist()
        self.trips.prepare(first)
        self._presence = fold(self.seed, AVAILABLE, 0)
        for client in first:
            if self._is_there(client):
                self._dispatch(client)
        self._fill(0)

    def _event(self, progress: Progress) -> tuple[float, int]:
        """The next client answers or leaves, and another one is sent out: joules, and bytes up."""
        events, trips = self.going, self.trips
        events.now, number, client, answers, taken = heappop(events.flights)
        place = trips.place(client)
        joules, up = trips.joules[place], trips.up[place]
        self._busy.discard(client)
        progress.cohort.add(client)
        if self._idle is not None:
            insort(self._idle, client)
        if answers:
            self._answer(number, trips.rows[place])
        else:
            progress.dropped.append(Drop(client, self.tasks[0], f"left after {taken:.3g} s"))
            self._forget([number * self.rows + row for row in trips.rows[place]])
            trip = trips[client]
            joules, up = trip.joules_until(taken), int(trip.crossed(taken)[1] * up)
        self._fill(events.number)
        return joules, up

    def _answer(self, number: int, rows: tuple[int, ...]) -> None:
        self._answered[number] = len(rows)
        for row in rows:
            buffer = self.going.buffers[row]
            buffer.append(number * self.rows + row)
            if len(buffer) >= self.algorithm.buffer:
                self._move(row)

    # Sending out

    def _fill(self, moment: int) -> None:
        """Send clients to the free places, as far as there are any at this moment; nobody at work: at a later one."""
        events = self.going
        for _ in range(LOOKS):
            self._presence = fold(self.seed, AVAILABLE, moment)
            while len(events.flights) < self.size and (client := self._next()) is not None:
                self._dispatch(client)
            if len(events.flights) < self.size:
                events.number += 1  # a dispatch of nobody
            if events.flights:
                return
            moment = events.number
        raise checks.TooFewReplies(
            f"nobody is at work, and none of {self.clients} clients was available in {LOOKS} looks: raise availability"
        )

    def _dispatch(self, client: int) -> None:
        events, trips, place = self.going, self.trips, self.trips.place(client)
        number, events.number = events.number, events.number + 1
        for row in trips.rows[place]:
            version = events.versions[row]
            events.untrained[number * self.rows + row] = (client, version)
            if version * self.rows + row not in events.sent:
                self._wanted.add(version * self.rows + row)
        seconds = taken = trips.seconds[place]
        if self.stay is not None:
            taken = min(seconds, self.stay * self._draws(number)[1])
        self._busy.add(client)
        if self._idle is not None:
            del self._idle[bisect_left(self._idle, client)]
        down = trips.down[place]
        self.down += down if taken >= seconds else int(trips[client].crossed(taken)[0] * down)
        heappush(events.flights, (events.now + taken, number, client, taken >= seconds, taken))

    def _next(self) -> int | None:
        """The client of the next dispatch: any that is not at work and is available, by address; None: nobody is."""
        key = self._draws(self.going.number)[0]
        if self._idle is not None:
            there = self._available(self._idle)
            return there[key % len(there)] if there else None
        for _ in range(TRIES):
            client = key % self.clients
            if client not in self._busy and self._is_there(client):
                return client
            key = fold(key, 0) & POSITIVE
        return None

    def _is_there(self, client: int) -> bool:
        chance = self.trips.chance[self.trips.place(client)]
        return chance >= 1 or is_below(chance, self._presence, client)

    def _available(self, clients: list[int]) -> list[int]:
        """Those of many who are there."""
        if self._chances is None:
            self._chances = self.fleet.devices(np.arange(self.clients)).availability
            self._always = bool((self._chances >= 1).all())
        if self._always:
            return clients
        ids = np.array(clients)
        found: list[int] = ids[uniform(self._presence, ids) < self._chances[ids]].tolist()
        return found

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

    def _move(self, row: int) -> None:
        """A full buffer moves its row, sooner or later; bad uploads are dropped."""
        events = self.going
        jobs, events.buffers[row] = events.buffers[row], []
        if max(jobs) >= events.trained * self.rows:
            self._train()
        if events.bad:
            bad = [job for job in jobs if job in events.bad]
            self._bad += [Drop(client, self.tasks[0], reason) for client, reason in map(events.bad.__getitem__, bad)]
            for number in (job // self.rows for job in bad if job // self.rows in self._answered):
                self._answered[number] -= 1
            jobs = [job for job in jobs if job not in events.bad]
            self._forget(bad)
        if jobs:
            due = self._due.setdefault(row, Due([], []))
            due.jobs.extend(jobs)
            due.sizes.append(len(jobs))
            self._steps += 1
            events.versions[row] += 1
            if len(due.sizes) >= STEPS:
                self._step()

    def _step(self) -> None:
        """Take the steps that are due, and keep the versions that were sent out."""
        if not self.algorithm.adds_up:
            self._one_by_one()
        rows = dict.fromkeys([*self._due, *(key % self.rows for key in self._wanted)])  # others did not move
        plans, jobs = list[Plan](), 0
        for row in rows:
            due = self._due.get(row, Due([], []))
            if plans and (jobs + len(due.jobs)) * self.load.model_bytes > AT_ONCE:
                self._together(plans)
                plans, jobs = [], 0
            version = self.going.versions[row] - len(due.sizes)
            plans.append(plan(row, version, due, self.rows, self._wanted))
            jobs += len(due.jobs)
        if plans:
            self._together(plans)
        self._due, self._wanted = {}, set()

    def _one_by_one(self) -> None:
        """Steps of a server that remembers more than its model."""
        for row, due in self._due.items():
            first, begin = self.going.versions[row] - len(due.sizes), 0
            self._keep(row, first)
            for version, size in enumerate(due.sizes, first):
                arrivals = self._arrivals(due.jobs[begin : begin + size], np.full(size, version))
                self.models[row] = self.algorithm.moved(self.models[row], arrivals)
                self._keep(row, version + 1)
                begin += size
        for version in list(self._wanted):  # of rows that did not move
            self._keep(version % self.rows, version // self.rows)
        self._due = {}

    def _keep(self, row: int, version: int) -> None:
        """The row's model is of this version now: jobs that started from it will need it."""
        if (key := version * self.rows + row) in self._wanted:
            self._wanted.discard(key)
            sent = self.algorithm.asks(self.models[row]).send
            stack = {name: tree.map_(lambda leaf: leaf[None], part) for name, part in sent.items()}
            self.going.sent[key] = self.going.models.put(stack, 1)

    def _together(self, plans: list[Plan]) -> None:
        """All steps of some rows, those of a row as one product of matrices."""
        events, jobs = self.going, [job for one in plans for job in one.due.jobs]
        met = [np.arange(one.version, one.version + len(one.due.sizes)).repeat(one.due.sizes) for one in plans]
        if jobs:
            stack = stepped(self.algorithm, self.models, plans, self._arrivals(jobs, np.concatenate(met)))
        else:  # nobody moved
            stack = tree.stack([self.algorithm.base.params(self.models[one.row]) for one in plans])
        height, sent, begin = sum(len(one.after) for one in plans), sum(one.sent for one in plans), 0
        place = events.models.put({"params": stack}, height, sent) if sent else 0
        for one in plans:
            keys = [(one.version + step) * self.rows + one.row for step in one.after[: one.sent]]
            events.sent.update(zip(keys, range(place + begin, place + begin + one.sent), strict=True))
            begin += len(one.after)
            if one.due.jobs:
                last = {name: leaf[begin - 1].clone() for name, leaf in stack.items()}
                self.models[one.row] = {**self.models[one.row], "params": last}

    def _train(self) -> None:
        """Compute everything that is under way, in one stack."""
        self._step()
        events = self.going
        jobs = np.fromiter(events.untrained, np.int64, len(events.untrained))
        clients, versions = np.array(list(events.untrained.values()), np.int64).T
        numbers, rows = np.divmod(jobs, self.rows)
        keys = fold_array(fold_array(fold_array(fold(self.seed, CLIENT), numbers + 1), 0), clients)
        places = np.array([events.sent[key] for key in (versions * self.rows + rows).tolist()], np.int64)
        sent = events.models.take(places)
        if self._stack is None:
            self._stack, self._judge = Stack(self.simulator, self.tasks), Judge(self.simulator, self.tasks)
        who, there, addresses = map(torch.from_numpy, (clients.copy(), rows, keys.view(np.int64)))
        upload, weights = self._stack.fold(Versioned(who, there, addresses, sent))
        events.sizes, bad = self._judge(events.sizes, Jobs(who, there, there), upload, weights, sent)
        if bad:  # a state holds finite numbers alone
            good = torch.ones(len(jobs), dtype=torch.bool)
            good[list(bad)] = False
            good = good.to(weights.device)
            upload = {name: tree.map_(lambda leaf: _without(leaf, good), part) for name, part in upload.items()}
            weights = _without(weights, good)
            events.bad |= {int(jobs[place]): (int(clients[place]), reason) for place, reason in bad.items()}
        start = sent["params"] if self.algorithm.needs_start else {}
        about = {"weights": weights, "versions": torch.from_numpy(versions.copy())}
        first = events.uploads.put({**upload, START: start, ABOUT: about}, len(jobs))
        events.places.update(zip(jobs.tolist(), range(first, first + len(jobs)), strict=True))
        events.untrained, events.sent, events.models, events.trained = {}, {}, Shelf(), events.number

    def _arrivals(self, jobs: list[int], versions: Array) -> Arrivals:
        """The uploads of jobs, which meet these versions of their row; they are not needed again."""
        events = self.going
        places = np.array([events.places.pop(job) for job in jobs], np.int64)
        found = events.uploads.take(places)
        events.uploads.let_go(places)
        start, about = found.pop(START), found.pop(ABOUT)
        ago = torch.from_numpy(versions) - about["versions"]
        self._ago, self._counted = self._ago + int(ago.sum()), self._counted + len(jobs)
        return Arrivals(found, start, about["weights"], ago)

    def _forget(self, jobs: list[int]) -> None:
        """These will not arrive."""
        events = self.going
        for job in jobs:
            events.untrained.pop(job, None)
            events.bad.pop(job, None)
        if places := [events.places.pop(job) for job in jobs if job in events.places]:
            events.uploads.let_go(np.array(places, np.int64))


def _without(leaf: Tensor, good: Tensor) -> Tensor:
    """Zeros in place of what is not good."""
    return torch.where(good.view(-1, *[1] * (leaf.dim() - 1)), leaf, torch.zeros_like(leaf))
