"""The link to a real fleet: phases as Flower messages, to nodes that do the work of clients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from flwr.app import RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedge import inputs
from fedge.algorithms.asynchronous import Late
from fedge.checks import positive
from fedge.core import Algorithm, Ask, At, Examples, Progress, Share
from fedge.deploy.asynchronous import Abroad
from fedge.deploy.client import KEEP, WORK
from fedge.deploy.envelope import opened, pack, short, stamp
from fedge.deploy.outage import Outages
from fedge.deploy.post import Letter, send
from fedge.deploy.roster import Roster
from fedge.engine.clients.directory import Directory
from fedge.engine.clients.memory import Job
from fedge.engine.clients.population import Population
from fedge.engine.links import wire
from fedge.engine.links.base_link import Replies
from fedge.engine.links.message_link import Mail, MessageLink, Parts
from fedge.engine.runtime import plain_runtime
from fedge.federation import Federation
from fedge.ledger import Row


@dataclass(frozen=True)
class Timing:
    """Where the seconds of a phase went, for the slowest node. The rest is waiting and polling."""

    round: int
    phase: int
    seconds: float
    start: float  # from the start of a node's process to its work
    work: float


class Spent(NamedTuple):
    """What a node says that it took, in seconds: the start of its process, and its work."""

    start: float
    work: float

    def within(self, seconds: float) -> Spent:
        """Neither took longer than the phase."""
        return Spent(min(self.start, seconds), min(self.work, seconds))


NOTHING = Spent(0.0, 0.0)


class FlowerLink(MessageLink):
    """A link over Flower's grid. One message per client and phase; the server's arithmetic is the loop-back link's.

    Works in Flower's simulation and in its deployments. A node that dies, hangs, raises, or answers garbage, late or
    never costs its own contribution, and the record says so. `federation` is what the server knows: the test set, an
    example to try the model on, how many clients there are. Who holds which rows, the nodes say themselves.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        federation: Federation,
        grid: Grid,
        roster: Roster,
        *,
        label: str = "",
        deadline: float = 600.0,
        clocked: Callable[[Timing], None] = lambda timing: None,
        resumed: bool = False,
        **options: Any,
    ) -> None:
        positive("deadline", deadline)
        self.clocked, self._outages = clocked, Outages()
        self._phases: list[dict[str, Any]] = []  # where the seconds of a round went, for `fedge edge fit`
        self._told: dict[int, Spent] = {}  # by node, as its last answer that could be read said
        self._faults = ["the server app was started again and went on from its checkpoint"] if resumed else []
        self.grid, self.roster, self.label, self.deadline = grid, roster, label, float(deadline)
        self._shared: tuple[str, bytes] = ("", b"")  # token and examples
        self._owed: set[int] = set()  # clients that have to be sent the shared examples (again)
        self._run = uuid4().hex  # nodes forget what they remember of another run
        self._void: dict[int, list[list[int]]] = {}  # client -> (round, phase, row) of uploads that did not count
        self._since: dict[int, int] = {}  # client -> the round from which on none of its uploads counted
        runtime = plain_runtime(algorithm, federation)
        self.pool = Population(federation, runtime.dtype, runtime.device)  # what the server knows of its clients
        directory = Directory(federation.clients, self.pool.rows_of, self._sizes)
        super().__init__(algorithm, runtime, directory, **options)
        self._late = Late.of(algorithm)
        self._abroad = None if self._late is None else Abroad(self, self._late.algorithm)
        if self.ledger.rows:
            self._greeted(0)  # the greetings brought the rows

    def _sizes(self, clients: Tensor) -> Tensor:
        """How many examples clients fold over, as their nodes said when they joined; shared ones included."""
        own = [self.roster.examples.get(client, 0) for client in clients.tolist()]
        return torch.tensor(own, dtype=torch.long) + self.pool.each

    def _greeted(self, place: int) -> None:
        """Book the greetings since the last time beside the payload of this row of the ledger."""
        row, (down, up) = self.ledger.rows[place], self.roster.take_wire(self.label)
        self.ledger.rows[place] = replace(row, wire_down=(row.wire_down or 0) + down, wire_up=(row.wire_up or 0) + up)

    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Replies:
        if any(one.limits is not None for one in asks):
            raise ValueError("an ask limits the steps of clients, but the nodes of a real fleet do whole tasks")
        if at.phase == 0:
            self._meet()
        place = len(self.ledger)
        try:
            return super().ask(at, asks, clients)
        finally:
            if len(self.ledger) > place:
                self._greeted(place)

    @torch.no_grad()
    def advance(self, state: Any, seed: int, round: int, size: int) -> tuple[Any, Progress] | None:
        if self._abroad is None or self._late is None:
            return None
        found, progress = self._abroad.advance(self._late.inner(state), seed, round, size)
        return self._late.after(state, found), progress

    def exchange(self, at: At, asks: tuple[Ask, ...], requests: dict[int, Parts]) -> dict[int, Mail]:
        begin = time.perf_counter()
        nodes = {client: self.roster.node(client) for client in requests}
        there = {node: client for client, node in nodes.items() if node is not None}
        once = stamp()
        contents = {node: self._request(at, asks, client, requests[client], once) for node, client in there.items()}
        most = {node: self.most[client] for node, client in there.items()}
        letters = send(self.grid, WORK, contents, deadline=self.deadline, group=str(at.round), most=most)
        self._told = {}
        mail = {
            there[node]: self._opened(there[node], node, letter, requests[there[node]])
            for node, letter in letters.items()
        }
        self._release(letters, there, f"in round {at.round}")
        self._clock(at, time.perf_counter() - begin, letters, there)
        absent = {client: Mail({}, self.roster.missing(client), 0, 0) for client in requests if client not in mail}
        return {client: (mail | absent)[client] for client in requests}

    def _release(self, letters: dict[int, Letter], clients: dict[int, int], when: str) -> None:
        for node, letter in letters.items():
            if letter.silent:
                self.roster.release(clients[node], node, f"{letter.lost} {when}")
            elif letter.content is not None:
                self.roster.silence.answered(node)

    def notes(self) -> dict[str, Any]:
        """What went wrong in this round without being a client's fault, and its times, for its record."""
        faults, self._faults = [*self._faults, *self._outages.take()], []
        phases, self._phases = self._phases, []
        more = {} if self._abroad is None else self._abroad.notes()
        return more | ({"faults": faults} if faults else {}) | ({"phases": phases} if phases else {})

    @contextmanager
    def working(self) -> Iterator[None]:
        self._outages.attach()
        try:
            with super().working():
                yield
        finally:
            self._outages.detach()

    def _meet(self, probe: bool = True, gather: bool = True) -> None:
        """Nodes may have joined since the last round; they say which rows they hold.

        With `gather` as many as a phase needs are waited for.
        """
        self.roster.look(self.deadline, label=self.label, probe=probe)
        if gather:
            self.roster.gather(self.min_replies, self.deadline, self.label)
        for client, rows in self.roster.rows.items():
            self.directory.told(client, rows[self.label])

    def _request(self, at: At, asks: tuple[Ask, ...], client: int, parts: Parts, once: bytes) -> RecordDict:
        wanted = {str(position): [list(asks[position].tasks), list(asks[position].reuse)] for position in parts}
        blobs = {str(position): blob for position, blob in parts.items()}
        if client in self._owed:
            blobs["shared"] = self._portion(client)
        head: dict[str, Any] = {
            "at": list(at),
            "label": self.label,
            "run": self._run,
            "shared": self._shared[0],
            "asks": wanted,
        }
        if client in self._void:
            head["void"] = self._void[client]
        if client in self._since:
            head["void_since"] = self._since[client]
        return pack(head, blobs, once)

    def settings(self) -> dict[str, Any]:
        void = {client: list(known) for client, known in self._void.items()}
        told = {"void": void, "since": dict(self._since)} if void else {}
        return {"run": self._run, "keys": self.roster.identities.settings(), **told}

    def restore(self, settings: Mapping[str, Any]) -> None:
        self._run = settings.get("run", self._run)
        self.roster.restore(settings.get("keys", {}))
        void, since = settings.get("void", {}), settings.get("since", {})
        self._void = {int(k): [[int(one) for one in job] for job in jobs] for k, jobs in void.items()}
        self._since = {int(client): int(round) for client, round in since.items()}

    def begin(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        super().begin(rows)
        if not any(row.round for row in rows):  # else clients have not heard yet what did not count
            self._void, self._since = {}, {}

    def memory_bytes(self) -> int | None:
        return None

    def void(self, at: At, jobs: list[Job]) -> None:
        """Clients are told with their next message; until then nothing of the round is final for them.

        One that has not heard of an earlier round yet has given no good answer since: then one number says it all.
        """
        for client, row in jobs:
            known, one = self._void.setdefault(client, []), [at.round, at.phase, row]
            if known and known[0][0] != at.round:
                self._since.setdefault(client, at.round)
            elif one not in known:
                known.append(one)

    def _opened(self, client: int, node: int, letter: Letter, wanted: Iterable[int] = ()) -> Mail:
        if letter.content is None:
            return Mail({}, letter.lost, letter.down, letter.up)
        try:
            head, parts = opened(letter.content, wanted)
        except ValueError as error:
            return Mail({}, str(error), letter.down, letter.up)
        self._told[node] = _seconds(head)
        lost, who = None, head.get("client")
        if type(who) is not int or who != client:
            lost = _stranger(head)
            self.roster.expel(client, node, lost)
        elif "error" in head:
            lost = short(head["error"])
        elif "forgot" in head:
            lost = f"it lost {short(head['forgot'])} and is sent them again: its node was restarted"
            self._owed.add(client)
        else:
            self._owed.discard(client)
            if wanted:  # a message with shared examples alone does not say what did not count
                self._void.pop(client, None)
                self._since.pop(client, None)
        return Mail(parts, lost, letter.down, letter.up)

    def share(self, at: At, wanted: Share) -> Examples:
        """Examples of the server's own pool, to every client; an absent client gets them with its first work."""
        row = self.pool.share(at, wanted)
        self._shared = (f"{self.label}/{at.seed}/{at.round}/{at.phase}", self._packed(self.pool.shared))
        self._meet()
        clients = {node: client for client in self.roster.nodes if (node := self.roster.node(client)) is not None}
        head, once = {"shared": self._shared[0]}, stamp()
        contents = {n: pack(head, {"shared": self._portion(k)}, once) for n, k in clients.items()}
        letters = send(self.grid, KEEP, contents, deadline=self.deadline)
        self._owed = set(range(self.pool.clients))
        for node, letter in letters.items():
            self._opened(clients[node], node, letter)
        self._release(letters, clients, "when it was sent examples")
        down, up = (sum(getattr(letter, way) for letter in letters.values()) for way in ("down", "up"))
        self.ledger.add(replace(row, wire_down=down, wire_up=up))
        self._greeted(-1)
        return self.pool.examples_shared()

    def _packed(self, picked: Tensor) -> bytes:
        return wire.encode({"x": inputs.take(self.pool.x, picked), "y": self.pool.y[picked]})

    def _portion(self, client: int) -> bytes:
        """The shared examples that a client gets."""
        mine = self.pool.shared_with(client)
        return self._shared[1] if mine is self.pool.shared else self._packed(mine)

    def _clock(self, at: At, seconds: float, letters: dict[int, Letter], there: dict[int, int]) -> None:
        spent = {node: self._told.get(node, NOTHING).within(seconds) for node in letters}
        told = [[there[node], *spent[node], letter.down, letter.up] for node, letter in letters.items()]
        self._phases.append({"round": at.round, "phase": at.phase, "seconds": seconds, "clients": told})
        start, work = map(max, zip(*spent.values() or [NOTHING], strict=True))
        self.clocked(Timing(at.round, at.phase, seconds, start, work))


def _stranger(head: dict[str, Any]) -> str:
    """Why an answer is not from the client that the node was asked as."""
    if "error" in head:
        return short(head["error"])
    if "client" in head:
        return f"its node is client {short(head['client'])} now: it was started again with another partition-id"
    return "its node did not say which client it is: give it the same version of fedge"


def _seconds(head: dict[str, Any]) -> Spent:
    """What the node says its process start and its work took."""
    try:
        found = head["seconds"]
        start, work = float(found.get("start", 0)), float(found.get("work", 0))
    except Exception:  # telemetry must not cost more than itself
        return NOTHING
    return Spent(start, work) if math.isfinite(start + work) and min(start, work) >= 0 else NOTHING
