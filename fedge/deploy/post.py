"""Messages to nodes and their answers, within a deadline.

`Grid.send_and_receive` is a push and then a pull of all answers every three seconds. These are the same two calls of
Flower's grid with a shorter pause, and one pull per node, each in a thread: pulling an answer that a dying node left
half uploaded blocks for minutes, which must not cost the other nodes their answers. Nor must an answer that Flower
cannot put together, or that is too large: whatever goes wrong with one answer is its node's loss, and what goes wrong
with the grid itself is raised.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

import httpx
from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from fedge.deploy.envelope import allow, short, wire_bytes
from fedge.deploy.scale import AGAIN, Unread, pull

log = logging.getLogger(__name__)
PAUSE = 0.2  # seconds between two looks for an answer
AT_ONCE = 16  # nodes up to which that holds; with more of them, each is looked at less often
KEPT = 2  # deadlines for which Flower keeps a message: the first may be spent on sending it
FRAME = 1 << 20  # bytes of an answer beside its uploads: its head, and what Flower adds
GRID = (httpx.TransportError, OSError)  # of these no device is the cause


class Letter(NamedTuple):
    """One node's answer or why there is none, and the bytes that travelled both ways."""

    content: RecordDict | None
    lost: str
    down: int
    up: int
    silent: bool = False  # it had its time and nothing came, or its app died


class Posting:
    """Messages on their way, one per node: answers are taken as they come.

    The deadline begins when all are sent: a SuperLink that is away, or a large model, delays the sending, which is not
    the nodes' fault.
    """

    def __init__(
        self,
        grid: Grid,
        kind: str,
        contents: dict[int, RecordDict],
        *,
        deadline: float,
        group: str = "",
        most: Mapping[int, int] | None = None,
    ) -> None:
        messages = {
            node: Message(
                allow(content, deadline), dst_node_id=node, message_type=kind, ttl=KEPT * deadline, group_id=group
            )
            for node, content in contents.items()
        }
        self.grid, self.deadline, self._most = grid, deadline, most or {}  # node -> bytes of its uploads
        self.down = {node: wire_bytes(message) for node, message in messages.items()}
        sent = zip(_push(grid, list(messages.values())), messages, strict=False)
        self._end = time.monotonic() + deadline
        self._waiting = {node: message for message, node in sent if message}
        self._refused = messages.keys() - self._waiting.keys()
        self._box: queue.Queue[tuple[int, Letter | BaseException]] = queue.Queue()
        self._pause = PAUSE * max(1.0, len(self._waiting) / AT_ONCE)
        for node, name in self._waiting.items():
            threading.Thread(target=self._fetch, args=(node, name), daemon=True).start()

    def _fetch(self, node: int, message: str) -> None:
        try:
            while True:
                replies, up = pull(self.grid, message, self._most.get(node, 0) + FRAME, self._end)
                if replies:
                    self._box.put((node, _letter(replies[0], self.down[node], up)))
                    return
                if time.monotonic() >= self._end:
                    return
                time.sleep(self._pause)
        except BaseException as error:  # Flower's "this run was stopped" is no Exception
            self._box.put((node, self._spoilt(node, error)))

    def _spoilt(self, node: int, error: BaseException) -> Letter | BaseException:
        """An answer that cannot be had, unless the grid itself does not work any more: that is everybody's."""
        if not isinstance(error, Exception) or (isinstance(error, GRID) and not isinstance(error, TimeoutError)):
            return error
        try:
            connected(self.grid)
        except BaseException:
            return error.__cause__ or error
        if isinstance(error, Unread):
            return Letter(None, str(error), self.down[node], error.weight)
        what = short(f"{type(error).__name__}: {error}")
        return Letter(None, f"the message cannot be read: {what}", self.down[node], 0)

    def take(self, seconds: float) -> dict[int, Letter]:
        """What came since the last look, by node; waits at most so long, in total.

        A node that has not answered in time is among them, as lost. An error of the grid itself, such as a run that was
        stopped, is raised.
        """
        end = min(time.monotonic() + seconds, self._end)
        found = {node: Letter(None, "the message was not accepted", self.down[node], 0) for node in self._refused}
        self._refused = set()
        while self._waiting:
            try:
                node, answer = self._box.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(answer, BaseException):
                raise answer
            del self._waiting[node]
            found[node] = answer
        if time.monotonic() >= self._end:
            lost = f"no answer within {self.deadline:g} s"
            found |= {node: Letter(None, lost, self.down[node], 0, silent=True) for node in self._waiting}
            self._waiting = {}
        return dict(sorted(found.items()))


def send(
    grid: Grid,
    kind: str,
    contents: dict[int, RecordDict],
    *,
    deadline: float,
    group: str = "",
    most: Mapping[int, int] | None = None,
) -> dict[int, Letter]:
    """One message per node; every node is in the result, as lost if it has not answered in time.

    `most` is how many bytes the uploads of a node may have; without it an answer is a head alone.
    """
    return Posting(grid, kind, contents, deadline=deadline, group=group, most=most).take(math.inf)


def connected(grid: Grid) -> list[NodeInfo]:
    """The nodes that are connected; a SuperLink that is too busy to say so is asked again."""
    for pause in AGAIN:
        try:
            return list(grid.get_nodes())
        except httpx.HTTPStatusError as error:
            if not error.response.is_server_error:
                raise
        time.sleep(pause)
    return list(grid.get_nodes())


def _push(grid: Grid, messages: list[Message]) -> list[str]:
    """Hand messages to the SuperLink, again if need be.

    One that was killed while it took them has some of their objects, and refuses those that it got without saying so;
    a message that it knows already it takes for the same, and asks only for what is missing.
    """
    for pause in AGAIN:
        try:
            return list(grid.push_messages(messages))
        except Exception as error:
            log.warning("the messages had to be sent again: %s", short(f"{type(error).__name__}: {error}"))
            time.sleep(pause)
    return list(grid.push_messages(messages))


def _letter(reply: Message, down: int, up: int) -> Letter:
    if reply.has_error():
        words = f"Flower says: {short(reply.error.reason)} (code {reply.error.code})"
        return Letter(None, words, down, up, silent=reply.error.code == ErrorCode.CLIENT_APP_CRASHED)
    return Letter(reply.content, "", down, up)
