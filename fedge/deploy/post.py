"""Messages to nodes and their answers, within a deadline.

`Grid.send_and_receive` is a push and then a pull every three seconds. These are the same two calls of Flower's grid
with a shorter pause, which is most of what a fast phase waits for on the server's side.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedge.deploy.envelope import wire_bytes

PAUSE = 0.2  # seconds between two looks for answers


class Letter(NamedTuple):
    """One node's answer or why there is none, and the bytes that travelled both ways."""

    content: RecordDict | None
    lost: str
    down: int
    up: int


def send(
    grid: Grid,
    kind: str,
    contents: dict[int, RecordDict],
    *,
    deadline: float,
    group: str = "",
) -> dict[int, Letter]:
    """One message a node; every node is in the result. What has not answered in time is lost, and so is its answer."""
    letters: dict[int, Letter] = {}
    messages = {
        node: Message(content, dst_node_id=node, message_type=kind, ttl=deadline, group_id=group)
        for node, content in contents.items()
    }
    down = {node: wire_bytes(message) for node, message in messages.items()}
    end = time.monotonic() + deadline
    sent = dict(zip(grid.push_messages(list(messages.values())), messages, strict=False))
    waiting = {message: node for message, node in sent.items() if message}
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            node = waiting.pop(reply.metadata.reply_to_message_id, None)
            if node is not None:
                letters[node] = _opened(reply, down[node])
        if not waiting or time.monotonic() >= end:
            break
        time.sleep(PAUSE)
    for node in messages:
        if node not in letters:
            lost = f"no answer within {deadline:g} s" if node in waiting.values() else "the message was not accepted"
            letters[node] = Letter(None, lost, down[node], 0)
    return letters


def _opened(reply: Message, down: int) -> Letter:
    up = wire_bytes(reply)
    if reply.has_error():
        return Letter(None, f"Flower says: {reply.error.reason} (code {reply.error.code})", down, up)
    return Letter(reply.content, "", down, up)
