"""Who is there: which node is which client. A node is asked when it joins, and again while it cannot be used."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flwr.serverapp import Grid

from fedge.deploy.client import HELLO
from fedge.deploy.envelope import opened, pack, short
from fedge.deploy.identity import Identities
from fedge.deploy.post import Letter, Posting, connected
from fedge.deploy.silence import Silence
from fedge.engine.links.wire import KEY

Say = Callable[[str], None]
GREETING = 60.0  # seconds for a node to say who it is: it starts a process and loads its examples
GRACE = 0.2  # seconds that a round waits for nodes that it sees for the first time
PROBE = 20.0  # seconds that a round waits, once, for nodes that did not answer in the last one
AGAIN = 10.0  # seconds after which, before the start, a node that cannot be used is asked again
MOST_ROWS = 1 << 20  # rows that a client can say it holds
NAMED = 3  # nodes of which a reason speaks at most


def _are_rows(rows: Any) -> bool:
    """Rows, each said once: one that is said twice would count as two clients.

    They are below what keys are (`wire`): of larger numbers many can have one hash, and a set of these takes for ever.
    """
    if not isinstance(rows, list) or len(rows) > MOST_ROWS:
        return False
    if not all(type(row) is int and 0 <= row < KEY for row in rows):
        return False
    return len(set(rows)) == len(rows)


class NodesMissing(RuntimeError):
    """Too few nodes are connected to begin."""


class Out(NamedTuple):
    """A connected node that cannot be used: which client it is, if that is known, and why."""

    client: int | None
    why: str


class Roster:
    """Nodes by client. A client's number is its node's partition id, so a deployed run draws what a simulated one does.

    Nodes come and go: every look asks those that are new, and knows who is connected now. Flower keeps a node's id when
    it is started again, maybe as another client: an identity ends when the node leaves, or says otherwise. Greetings
    are under way while rounds go on; a node that has answered by the next look takes part. A node that let a deadline
    pass is released: nothing is sent to it, and nobody waits for it, until it has said again who it is (`Silence`).

    `keys` are the clients by fingerprint of their key (`read_keys`): no node can be another client than its key's.
    `sizes` and `holds` are how many examples and which rows, by label, every client must have, where that is known.
    """

    def __init__(
        self,
        grid: Grid,
        clients: int,
        labels: Iterable[str],
        say: Say = lambda line: None,
        sizes: Sequence[int] | None = None,
        keys: Mapping[str, int] | None = None,
        holds: Callable[[int, str], list[int]] | None = None,
    ) -> None:
        self.identities, self.holds = Identities(keys), holds
        self.grid, self.clients, self.labels, self.say = grid, clients, tuple(labels), say
        self.nodes: dict[int, int] = {}  # client -> node, of those that are connected
        self.rows: dict[int, dict[str, list[int]]] = {}  # client -> by label
        self.sizes = sizes  # how many examples each client must have, None: as many as its node says
        self.examples: dict[int, int] = {}  # client -> how many it has, which bounds its weight
        self._due = dict.fromkeys(self.labels, (0, 0))  # bytes of greetings, down and up, not yet booked
        self._online: set[int] = set()
        self._asking: dict[int, Posting] = {}  # node -> its greeting that is under way
        self._met: set[int] = set()  # nodes that have been asked
        self._out: dict[int, Out] = {}
        self.silence = Silence()
        self._said: dict[int, str] = {}

    def look(
        self,
        deadline: float,
        patience: float | None = None,
        again: bool = True,
        label: str | None = None,
        probe: bool = True,
    ) -> None:
        """Ask the nodes that are new who they are, and those that cannot be used `again`; hear who has answered.

        Waits `patience` seconds at most for answers (None: a moment, and only if there are new nodes). The bytes go to
        the algorithm that looks, by its `label` (None: to all of them). Without `probe` nobody waits for a node that
        was silent: others are at work meanwhile.
        """
        nodes = connected(self.grid)
        self._online = {node.node_id for node in nodes}
        for node in nodes:
            self.identities.met(node.node_id, node.public_key)
        self._leave()
        labels = self.labels if label is None else (label,)
        known = {*self.nodes.values(), *self._asking}
        known |= self.silence.resting()
        ask = {node for node in self._online - known if again or node not in self._out}
        if patience is None:
            self.silence.round()
        new, fresh = not self._met.issuperset(ask), ask & self.silence.fresh()
        if ask - fresh:
            self._greet(ask - fresh, deadline)
        if fresh:
            self._hear(min(PROBE, deadline) if probe else 0.0, labels, [self._greet(fresh, deadline)])
        self._hear((GRACE if new else 0.0) if patience is None else patience, labels, self._asking.values())

    def _greet(self, nodes: set[int], deadline: float) -> Posting:
        contents = dict.fromkeys(sorted(nodes), pack({"labels": list(self.labels)}))
        posting = Posting(self.grid, HELLO, contents, deadline=min(GREETING, deadline))
        self._asking |= dict.fromkeys(nodes, posting)
        self._met |= nodes
        return posting

    def _leave(self) -> None:
        """Forget all about nodes that are gone."""
        self.nodes = {client: node for client, node in self.nodes.items() if node in self._online}
        self._asking = {node: posting for node, posting in self._asking.items() if node in self._online}
        self._out = {node: out for node, out in self._out.items() if node in self._online}
        self._met &= self._online
        self.silence.leave(self._online)

    def _hear(self, patience: float, labels: tuple[str, ...], postings: Iterable[Posting]) -> None:
        end = time.monotonic() + patience
        for posting in list(dict.fromkeys(postings)):
            for node, letter in posting.take(max(0.0, end - time.monotonic())).items():
                self._pay(letter, labels)
                if self._asking.get(node) is posting:
                    del self._asking[node]
                    self._greeted(node, letter)

    def _pay(self, letter: Letter, labels: tuple[str, ...]) -> None:
        """One greeting serves all algorithms: its bytes are split evenly, the remainder goes to the first."""
        for place, label in enumerate(labels):
            down, up = (_part(size, len(labels), place) for size in (letter.down, letter.up))
            self._due[label] = (self._due[label][0] + down, self._due[label][1] + up)

    def take_wire(self, label: str) -> tuple[int, int]:
        """This algorithm's share of the greetings' bytes, down and up, not booked yet."""
        due, self._due[label] = self._due[label], (0, 0)
        return due

    def _greeted(self, node: int, letter: Letter) -> None:
        if letter.content is None:
            self._leave_out(node, self.identities.owner(node), letter.lost, "did not say who it is")
            return
        client = None
        try:
            head, _ = opened(letter.content)
            client = head["client"] if type(head.get("client")) is int else None
            client = self._client(head)
        except ValueError as error:
            self._leave_out(node, client, str(error))
            return
        if (refusal := self.identities.refusal(node, client)) is not None:
            self._leave_out(node, self.identities.owner(node), refusal)
            return
        other = self.nodes.get(client)
        if other is not None and other != node:
            self._leave_out(node, client, f"node {other} is client {client} already; give each its partition-id")
            return
        if self._out.pop(node, None) is not None and self._said.pop(node, None) is not None:
            self.say(f"node {node} takes part again, as client {client}")
        self.identities.accept(node, client)
        self.nodes[client] = node
        self.rows[client] = {label: sorted(head["rows"][label]) for label in self.labels}
        self.examples[client] = head["examples"]

    def _leave_out(self, node: int, client: int | None, why: str, what: str = "is left out") -> None:
        self._out[node] = Out(client, f"node {node} {what}: {why}")
        if self._said.get(node) != self._out[node].why:  # it is asked every round, and said once
            self._said[node] = self._out[node].why
            self.say(self._out[node].why)

    def _client(self, head: dict[str, Any]) -> int:
        if "error" in head:
            raise ValueError(short(head["error"]))
        client, rows = head.get("client"), head.get("rows")
        if type(client) is not int or not 0 <= client < self.clients:
            raise ValueError(
                f"its partition-id is {short(client)}, it must be from 0 to {self.clients - 1}: "
                f"the experiment has {self.clients} clients"
            )
        if not isinstance(rows, dict) or not all(_are_rows(rows.get(label)) for label in self.labels):
            raise ValueError(
                "it did not say which rows it holds, each once: give it the same experiment and version of fedge"
            )
        self._check_examples(client, head.get("examples"))
        for label in self.labels if self.holds is not None else ():
            self._check_rows(client, label, rows[label])
        return client

    def _check_rows(self, client: int, label: str, rows: list[int]) -> None:
        """Who claims labels that it does not have would count in the means of all of them."""
        assert self.holds is not None
        wanted = self.holds(client, label)
        if sorted(rows) != sorted(wanted):
            said = f"{sorted(rows)[:NAMED]}{'...' * (len(rows) > NAMED)}"
            raise ValueError(
                f"it says that it holds the labels {said}, client {client} of the experiment holds others: give it the "
                "same experiment and data"
            )

    def _check_examples(self, client: int, examples: Any) -> None:
        if type(examples) is not int or not 0 < examples < 2**53:
            raise ValueError(f"it says that it has {short(examples)} examples, it must have at least 1")
        if self.sizes is not None and examples != self.sizes[client]:
            raise ValueError(
                f"it has {examples} examples, client {client} of the experiment has {self.sizes[client]}: give it the "
                "same experiment and data"
            )

    def node(self, client: int) -> int | None:
        """The node of a client, if it is connected."""
        return self.nodes.get(client)

    def expel(self, client: int, node: int, why: str) -> None:
        """A node answered as another client: ask it again who it is."""
        if self.nodes.get(client) == node:
            del self.nodes[client]
            self._met.discard(node)
            self._leave_out(node, client, why)

    def restore(self, seen: Mapping[str, int]) -> None:
        """Which keys were which clients before the server was started again; who contradicts that is asked again."""
        self.identities.restore(seen)
        for client, node in list(self.nodes.items()):
            if (refusal := self.identities.refusal(node, client)) is not None:
                self.expel(client, node, refusal)

    def release(self, client: int, node: int, why: str) -> None:
        """A node let a deadline pass: do without it until it has said again who it is."""
        if self.nodes.get(client) == node:
            del self.nodes[client]
            self._leave_out(node, client, f"{why}; {self.silence.note(node)}")

    def missing(self, client: int) -> str:
        """Why a client has no node; if no node claims it, which nodes are connected and cannot be used."""
        own = [out.why for out in self._out.values() if out.client == client]
        vacant = set(range(self.clients)) - self.nodes.keys()
        others = [out.why for out in self._out.values() if out.client not in vacant]
        waiting = [f"node {node} has not yet said who it is" for node in self._asking if node not in self._out]
        found = own or others + waiting
        if not found:
            return "its node is not connected"
        more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
        return ("" if own else "no node is this client: ") + "; ".join(found[:NAMED]) + more

    def gather(self, wanted: int, seconds: float, label: str) -> None:
        """Wait until so many clients are there, for without them a phase has failed before it begins."""
        end = time.monotonic() + seconds
        if len(self.nodes) < wanted:
            self.silence.wake()
        while len(self.nodes) < wanted and (left := end - time.monotonic()) > 0:
            self.look(seconds, patience=min(1.0, left), label=label)
            if not self._asking and len(self.nodes) < wanted:
                time.sleep(min(1.0, left))

    def wait(self, wanted: int, seconds: float, deadline: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until so many clients are connected; when time is up, at least one must be."""
        begin, shown, asked = time.monotonic(), -1, time.monotonic()
        while True:
            again = time.monotonic() >= asked + AGAIN
            asked = time.monotonic() if again else asked
            left = begin + seconds - time.monotonic()
            self.look(deadline, patience=min(1.0, max(left, GRACE)), again=again)
            there = len(self.nodes)
            if there != shown:
                self.say(f"{there} of {wanted} nodes are connected")
                shown = there
            if there >= wanted or stop():
                return
            left = begin + seconds - time.monotonic()
            if left <= 0:
                break
            if not self._asking:
                time.sleep(min(1.0, left))
        if not shown:
            why = "; ".join(out.why for out in list(self._out.values())[:NAMED])
            raise NodesMissing(
                f"no node of {wanted} connected within {seconds:g} s{why and f' ({why})'}: look at a node's log, and "
                "let `fedge deploy check` on its machine say why"
            )


def _part(size: int, parts: int, place: int) -> int:
    return size // parts + (size % parts if place == 0 else 0)
