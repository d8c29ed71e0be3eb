"""One answer pulled from Flower's grid, and no more of it than it may weigh.

Flower pulls every object of an answer and puts its arrays together from chunks. An answer may name a chunk any number
of times, so that 6 MB become gigabytes. Here objects are weighed as they come, and arrays before they are put together.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from fedge.deploy.envelope import short, wire_bytes

AGAIN = (0.5, 1.0, 2.0, 4.0)  # seconds before a SuperLink that is away, or too busy to answer, is asked again
AROUND = 2 << 20  # bytes of an answer that are no chunks: read, they take up to thirty times their size


class Unread(ValueError):
    """An answer that was not read, and why; `weight` bytes of it came."""

    def __init__(self, words: str, weight: int) -> None:
        super().__init__(words)
        self.weight = weight


class TooHeavy(Unread):
    """It is larger than it may be."""


class Scale:
    """Stands in for a grid's own client to the SuperLink while one answer is pulled: counts, and refuses."""

    def __init__(self, client: Any, most: int, end: float) -> None:
        self._client, self._most, self._end = client, most, end
        self.weight = 0  # bytes of the objects that came
        self._sizes: dict[str, int] = {}  # chunk -> bytes of its body
        self._around = 0  # bytes of all other objects
        self._arrays: list[list[str]] = []  # the chunks of each array, as often as they are named
        self._messages: list[str] = []
        self._lock = threading.Lock()  # Flower pulls several objects at a time

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def PullMessages(self, request: Any) -> Any:
        answer = self._patiently(self._client.PullMessages, request)
        self._messages = [message.metadata.message_id for message in answer.messages_list]
        return answer

    def PullObject(self, request: Any) -> Any:
        if time.monotonic() > self._end:
            raise TimeoutError("there is no time left to pull the answer")
        answer = self._patiently(self._client.PullObject, request)
        with self._lock:
            self._weigh(request.object_id, answer.object_content)
        return answer

    def ConfirmMessageReceived(self, request: Any) -> Any:
        """Flower confirms when all objects are there, before it puts them together."""
        answer = self._patiently(self._client.ConfirmMessageReceived, request)
        named = [chunk for chunks in self._arrays for chunk in chunks]
        if not self._sizes.keys() >= set(named):  # Flower takes an array for a chunk, and unpacks it each time
            raise ValueError("an array in the answer is made of what is no chunk")
        self._refuse_over(sum(self._sizes[chunk] for chunk in named), " once unpacked")
        return answer

    def _patiently(self, call: Callable[[Any], Any], request: Any) -> Any:
        """While its database is taken, by another node's list of objects say, a SuperLink answers HTTP 500."""
        for pause in AGAIN:
            try:
                return call(request)
            except httpx.HTTPStatusError as error:
                if not error.response.is_server_error or time.monotonic() + pause > self._end:
                    raise
            time.sleep(pause)
        return call(request)

    def _weigh(self, name: str, content: bytes) -> None:
        self.weight += len(content)
        self._refuse_over(self.weight)
        if content.startswith(b"ArrayChunk "):
            self._sizes[name] = len(content) - content.find(b"\0") - 1  # without Flower's head
            return
        self._around += len(content)
        if self._around > AROUND:
            words = f"the answer has over {AROUND} bytes that are no uploads: it was not read"
            raise TooHeavy(words, self.weight)
        if content.startswith(b"Array "):
            head, _, body = content.partition(b"\0")
            children = head.decode().split(" ")[1].split(",")
            self._arrays.append([children[place] for place in json.loads(body)["arraychunk_ids"]])

    def _refuse_over(self, weight: int, when: str = "") -> None:
        if weight > self._most:
            words = f"the answer has {weight} bytes{when}, at most {self._most} are expected: it was not read"
            raise TooHeavy(words, self.weight)

    def release(self, grid: Any) -> None:
        """Let the SuperLink forget an answer that is not wanted."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        for message in self._messages:
            wanted = ConfirmMessageReceivedRequest(node=grid.node, run_id=grid.run.run_id, message_object_id=message)
            with contextlib.suppress(Exception):  # its own clean-up takes it later
                self._client.ConfirmMessageReceived(wanted)


def pull(grid: Grid, message: str, most: int, end: float) -> tuple[list[Message], int]:
    """The answer to a message, if it is there, and the bytes that came; `TooHeavy` if it is larger than `most` bytes.

    One that Flower cannot put together is `Unread`; what goes wrong between the SuperLink and here is raised as it is.

    Flower's simulation passes objects in memory: there is nothing to pull and nothing to unpack.
    """
    client = getattr(grid, "_runtime_client", None)
    if client is None:
        replies = list(grid.pull_messages([message]))
        return replies, sum(map(wire_bytes, replies))
    scale, weighed = Scale(client, most, end), copy.copy(grid)
    weighed._client = scale
    try:
        return list(weighed.pull_messages([message])), scale.weight
    except TooHeavy:
        scale.release(weighed)
        raise
    except (httpx.TransportError, OSError):
        raise
    except Exception as error:
        what = short(f"{type(error).__name__}: {error}")
        raise Unread(f"the message cannot be read: {what}", scale.weight) from error
