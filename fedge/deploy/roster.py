"""Who is there: which node is which client, asked once a node."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from flwr.serverapp import Grid

from fedge.deploy.client import HELLO
from fedge.deploy.envelope import pack, short, unpack
from fedge.deploy.post import Letter, send

Say = Callable[[str], None]


def _are_rows(rows: Any) -> bool:
    return isinstance(rows, list) and all(isinstance(row, int) for row in rows)


class NodesMissing(RuntimeError):
    """Too few nodes are connected to begin."""


class Roster:
    """Nodes by client. A client's number is its node's partition id, so a deployed run draws what a simulated one does.

    Nodes come and go: every look asks those that are new, and knows who is connected now.
    """

    def __init__(self, grid: Grid, clients: int, labels: Iterable[str], say: Say = lambda line: None) -> None:
        self.grid, self.clients, self.labels, self.say = grid, clients, tuple(labels), say
        self.nodes: dict[int, int] = {}  # client -> node
        self.rows: dict[int, dict[str, list[int]]] = {}  # client -> by label
        self.wire = (0, 0)  # bytes down and up of all greetings
        self._asked: dict[int, int | None] = {}  # node -> client, None if it cannot be used
        self._online: set[int] = set()

    def look(self, deadline: float) -> None:
        """Ask the nodes that are new who they are; one that did not answer is asked again at the next look."""
        self._online = set(self.grid.get_node_ids())
        new = [node for node in self._online if node not in self._asked]
        if not new:
            return
        head = pack({"labels": list(self.labels)})
        for node, letter in send(self.grid, HELLO, dict.fromkeys(new, head), deadline=deadline).items():
            self.wire = (self.wire[0] + letter.down, self.wire[1] + letter.up)
            self._greeted(node, letter)

    def _greeted(self, node: int, letter: Letter) -> None:
        if letter.content is None:
            self.say(f"node {node} did not say who it is: {letter.lost}")
            return
        try:
            head, _ = unpack(letter.content)
            client = self._client(head)
        except ValueError as error:
            self._asked[node] = None
            self.say(f"node {node} is left out: {error}")
            return
        other = self.nodes.get(client)
        if other is not None and other in self._online and other != node:
            self._asked[node] = None
            self.say(f"node {node} is left out: node {other} is client {client} already; give each its partition-id")
            return
        self._asked[node], self.nodes[client] = client, node
        self.rows[client] = head["rows"]

    def _client(self, head: dict[str, Any]) -> int:
        if "error" in head:
            raise ValueError(short(head["error"]))
        client, rows = head.get("client"), head.get("rows")
        if not isinstance(client, int) or not 0 <= client < self.clients:
            raise ValueError(
                f"its partition-id is {client!r}, it must be from 0 to {self.clients - 1}: "
                f"the experiment has {self.clients} clients"
            )
        if not isinstance(rows, dict) or not all(_are_rows(rows.get(label)) for label in self.labels):
            raise ValueError("it did not say which rows it holds: give it the same experiment and version of fedge")
        return client

    def node(self, client: int) -> int | None:
        """The node of a client, if it is connected."""
        node = self.nodes.get(client)
        return node if node in self._online else None

    def wait(self, wanted: int, seconds: float, deadline: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Until so many clients are there; fewer, but one at least, are enough when time is over."""
        end, shown = time.monotonic() + seconds, -1
        while True:
            self.look(deadline)
            there = sum(self.node(client) is not None for client in self.nodes)
            if there != shown:
                self.say(f"{there} of {wanted} nodes are connected")
                shown = there
            if there >= wanted or stop():
                return
            if time.monotonic() >= end:
                break
            time.sleep(1)
        if not shown:
            raise NodesMissing(
                f"no node of {wanted} connected within {seconds:g} s: look at a node's log, and let "
                "`fedge deploy check` on its machine say why"
            )
