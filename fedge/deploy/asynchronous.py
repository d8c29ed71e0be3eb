"""Asynchronous training on a real fleet: nodes answer when they can, and nobody is waited for.

As many clients as the cohort has are at work at any time. When one answers, its uploads go into the buffers of their
rows, a full buffer moves its row, and an idle client is sent the newest models. Dispatch j draws the batches of round
j + 1, as in a simulation. Who answers when is the fleet's affair: the record has the order, from which anybody can
compute the same models again.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fedge import tree
from fedge.algorithms.asynchronous import Arrivals, Asynchronous
from fedge.combine import Gather
from fedge.core import Ask, At, Drop, Params, Progress
from fedge.deploy.client import WORK
from fedge.deploy.envelope import stamp
from fedge.deploy.post import Letter, Posting
from fedge.engine.links import wire
from fedge.engine.links.collector import Collector
from fedge.engine.links.message_link import Parts
from fedge.engine.uploads.checks import TooFewReplies, require
from fedge.engine.uploads.intake import FIRST
from fedge.engine.uploads.sizes import Usuals
from fedge.keys import DISPATCH, fold
from fedge.ledger import Row

if TYPE_CHECKING:
    from fedge.deploy.flower import FlowerLink

PAUSE = 0.05  # seconds between two looks for answers
FEW = 3  # absent clients that a skipped round names, if it does not need more
LOOK = 2.0  # seconds between two looks for nodes, while places are free
POSITIVE = (1 << 62) - 1


class Away(NamedTuple):
    """A client at work: the number of its dispatch, its node, what it was sent and from which versions, and when."""

    number: int
    node: int
    parts: Parts
    posting: Posting
    collector: Collector
    models: list[Any]
    versions: list[int]
    begin: float


class Abroad:
    """Advances an asynchronous algorithm by so many answers of a fleet's nodes.

    What is under way belongs to this process: a server that is started again has its models, versions and buffers from
    the checkpoint, and sends everybody out anew.
    """

    def __init__(self, link: FlowerLink, algorithm: Asynchronous) -> None:
        self.link, self.algorithm = link, algorithm
        for name, task in link.tasks.items():
            if task.remembers or task.codec is not None or task.draws:
                raise ValueError(f"task '{name}' remembers, encodes or draws, which asynchronous training does not")
        self._away: dict[int, Away] = {}  # by client
        self._here: dict[int, Letter] = {}  # answers that nobody has looked at yet, by client
        self._usual = Usuals()  # sizes of all uploads so far, by client: who answers more often has no more say
        self._enough = False  # whether the round has all its answers, and lacks clients at most
        self._left: list[int] = []  # the versions at the end of the last round, if it had one
        self._looked = 0.0
        self._notes: dict[str, Any] = {}

    def advance(self, state: dict[str, Any], seed: int, round: int, size: int) -> tuple[dict[str, Any], Progress]:
        """The state after `size` more answers, and who answered; those that were lost count as well.

        Clients take their time, and a liar need not: one whose answer did not count is not asked again in this round,
        and whatever the fast ones send, the round goes on while it can still have answers of `min_replies` clients.
        """
        self._open(state, seed, round)
        self.link._meet(probe=False)
        progress = Progress()
        while self._fill(size):
            heard = self._heard(max(1, size - len(self._answers)))
            for client, letter in heard.items():
                self._look_at(client, letter)
            for client, letter in heard.items():
                progress.cohort.add(client)
                progress.dropped += self._answer(client, letter)
        if len(self._good) < self.link.min_replies:
            progress.dropped += self._absent()
        require(len(self._good), self.link.min_replies, self._task, progress.dropped)
        return self._close(round), progress

    def notes(self) -> dict[str, Any]:
        """For the record of the round: the server's steps, how old uploads were, and every answer in order."""
        found, self._notes = self._notes, {}
        return found

    # A round's beginning and end

    def _open(self, state: dict[str, Any], seed: int, round: int) -> None:
        events, rows = state["events"], self.algorithm.rows or 1
        if events is not None and "flights" in events:
            raise ValueError("this state is that of a simulation, with clients under way in virtual time: start anew")
        events = events or {"number": 0, "versions": [0] * rows, "buffers": [[] for _ in range(rows)]}
        self.seed, self.round, self.models = seed, round, list(state["models"])
        self.number, self.versions = events["number"], list(events["versions"])
        if self.versions != self._left:  # the last round did not count: who is under way started from what never was
            self._away, self._here = {}, {}
        self._left = []  # until this one counts
        self._good, self._bad = set[int](), set[int]()  # clients whose answers in this round counted, or did not
        self.buffers = [list(buffer) for buffer in events["buffers"]]
        self._answers, self._ago, self._steps = list[Any](), list[int](), 0
        self._task = self._ask().tasks[0]
        self._row = Row(round, 0, "+".join(self._ask().tasks), 0, 0, 0, 0, 0, 0)

    def _close(self, round: int) -> dict[str, Any]:
        ledger = self.link.ledger
        ledger.add(self._row)
        self.link._greeted(len(ledger) - 1)
        mean = sum(self._ago) / len(self._ago) if self._ago else 0.0
        self._notes = {"server_steps": self._steps, "staleness": mean, "answers": self._answers}
        self._left = list(self.versions)
        events = {"number": self.number, "versions": self.versions, "buffers": self.buffers}
        return {"models": self.models, "events": events}

    def _book(self, clients: int = 0, down: int = 0, up: int = 0, wire_down: int = 0, wire_up: int = 0) -> None:
        row, whole = self._row, self._row.down + down
        wires = ((row.wire_down or 0) + wire_down, (row.wire_up or 0) + wire_up)
        self._row = Row(row.round, row.phase, row.task, row.clients + clients, whole, whole, row.up + up, *wires)

    # Sending out

    def _fill(self, size: int) -> bool:
        """Idle clients are sent out until so many are at work; whether there is anybody to wait for."""
        self._enough = len(self._answers) >= size
        if self._enough and not self._wanting():
            return False
        if not self._away and not (self._bad and not self._idle()):
            self._somebody()
        elif len(self._away) < size and time.monotonic() > self._looked + LOOK:
            self._look()
        while len(self._away) < size and (idle := self._idle()):
            key = fold(fold(self.seed, DISPATCH), self.number) & POSITIVE
            self._dispatch(idle[key % len(idle)])
        return bool(self._away)

    def _wanting(self) -> bool:
        """Whether too few clients have answered, and more may."""
        more = (self._away.keys() - self._good) or self._idle()
        return len(self._good) < self.link.min_replies and bool(more)

    def _look(self) -> None:
        """Who has come meanwhile; others are at work, so nobody is waited for."""
        self.link._meet(probe=False, gather=False)
        self._looked = time.monotonic()

    def _absent(self) -> list[Drop]:
        """Clients that could not be asked for want of a node, and why: the first few of them."""
        roster, few = self.link.roster, max(FEW, self.link.min_replies)
        there = roster.nodes.keys() | self._good | self._bad
        absent = itertools.islice((client for client in range(roster.clients) if client not in there), few)
        return [Drop(client, self._task, roster.missing(client)) for client in absent]

    def _somebody(self) -> None:
        end = time.monotonic() + self.link.deadline
        while not self._idle():
            if time.monotonic() >= end:
                why = f"no node was there to be asked within {self.link.deadline:g} s: start some"
                raise TooFewReplies(why, self._absent())
            time.sleep(PAUSE)
            self._look()

    def _idle(self) -> list[int]:
        """Clients that may be asked now: a node's rows are what it says, and may be none that there are."""
        task, rows = self.link.tasks[self._task], self.link.directory.rows
        there = self.link.roster.nodes.keys() - self._away.keys() - self._bad
        there -= self._good if self._enough else set()
        return [
            client
            for client in sorted(there)
            if task.rows is None or any(row < task.rows for row in rows(client, task))
        ]

    def _ask(self) -> Ask:
        """The newest models of all rows, and every upload as it comes."""
        asks = [self.algorithm.asks(model) for model in self.models]
        send = asks[0].send
        if self.algorithm.rows is not None:
            send = {name: tree.stack([ask.send[name] for ask in asks]) for name in send}
        return replace(asks[0], send=send, combine=Gather())

    def _dispatch(self, client: int) -> None:
        link, node, at, ask = self.link, self.link.roster.nodes[client], At(self.seed, self.number + 1, 0), self._ask()
        link.forget()
        collector = link._open(at, ask, torch.tensor([client]))
        collector.intake.compared_with(self._usual)
        parts = {0: wire.encode(collector.requests[client])}
        content, most = link._request(at, (ask,), client, parts, stamp()), {node: collector.most(client)}
        posting = Posting(link.grid, WORK, {node: content}, deadline=link.deadline, group=str(self.round), most=most)
        self._book(clients=1, down=collector.down, wire_down=posting.down[node])
        self._away[client] = Away(
            self.number, node, parts, posting, collector, list(self.models), list(self.versions), time.monotonic()
        )
        self.number += 1

    # Answers

    def _heard(self, most: int) -> dict[int, Letter]:
        """The answers that are there, in the order of dispatch; waits a moment if there is none.

        The first ones wait for each other: an upload that is alone cannot be compared with any.
        """
        for client, away in self._away.items():
            if client not in self._here and (letters := away.posting.take(0.0)):
                self._here[client] = letters[away.node]
        told = [letter for letter in self._here.values() if letter.content is not None]
        alone = self._usual.count() + len(told) < FIRST and len(self._here) < len(self._away)
        if not self._here or alone:
            time.sleep(PAUSE)
            return {}
        chosen = [client for client in self._away if client in self._here][:most]
        return {client: self._here.pop(client) for client in chosen}

    def _look_at(self, client: int, letter: Letter) -> None:
        """Open an answer and check its form: from then on its size is known."""
        away, link = self._away[client], self.link
        mail = link._opened(client, away.node, letter, away.parts)
        link._release({away.node: letter}, {away.node: client}, f"in round {self.round}")
        away.collector.heard({client} if mail.lost is None else set())
        link._take(client, away.parts, mail, [away.collector])

    def _answer(self, client: int, letter: Letter) -> list[Drop]:
        """Let what is good of an answer into the buffers; why anything of it does not count."""
        away = self._away.pop(client)
        collector = away.collector
        collector.settle()
        reply, dropped, row = collector.close()
        self._book(up=row.up, wire_up=letter.up)
        rows = sorted(collector.positions[client])
        seconds = round(time.monotonic() - away.begin, 3)
        self._answers.append([away.number, client, {str(one): away.versions[one] for one in rows}, seconds])
        uploads = reply.uploads
        for job, place in enumerate([] if uploads is None else uploads.rows.tolist()):
            assert uploads is not None
            parts = {name: tree.take(part, job) for name, part in uploads.parts.items()}
            start = self._start(away.models[place])
            one = {"upload": parts, "weight": uploads.weights["delta"][job], "start": start}
            self.buffers[place].append(one | {"version": away.versions[place]})
            self._move(place)
        (self._bad if dropped else self._good).add(client)
        return dropped

    def _start(self, model: Any) -> Params:
        return self.algorithm.base.params(model) if self.algorithm.needs_start else {}

    def _move(self, row: int) -> None:
        """A full buffer moves its row."""
        if len(self.buffers[row]) < self.algorithm.buffer:
            return
        jobs, self.buffers[row] = self.buffers[row], []
        upload = {name: tree.stack([job["upload"][name] for job in jobs]) for name in jobs[0]["upload"]}
        start = tree.stack([job["start"] for job in jobs]) if jobs[0]["start"] else {}
        ago = torch.tensor([self.versions[row] - job["version"] for job in jobs])
        arrivals = Arrivals(upload, start, torch.stack([job["weight"] for job in jobs]), ago)
        self.models[row] = self.algorithm.moved(self.models[row], arrivals)
        self.versions[row] += 1
        self._steps += 1
        self._ago += ago.tolist()
