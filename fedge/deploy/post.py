"""Messages to nodes and their answers, within a deadline.

`Grid.send_and_receive` is a push and then a pull of all answers every three seconds. These are the same two calls of
Flower's grid with a shorter pause, and one pull a node, each in a thread: to pull an answer that a dying node left half
uploaded blocks for minutes, which must not cost the others theirs.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import NamedTuple

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedge.deploy.envelope import wire_bytes

PAUSE = 0.2  # seconds between two looks for an answer
AT_ONCE = 16  # nodes up to which that holds; with more of them, each is looked at less often


class Letter(NamedTuple):
    """One node's answer or why there is none, and the bytes that travelled both ways."""

    content: RecordDict | None
    lost: str
    down: int
    up: int


def send(
    grid: Grid, kind: str, contents: dict[int, RecordDict], *, deadline: float, group: str = ""
) -> dict[int, Letter]:
    """One message a node; every node is in the result. What has not answered in time is lost, and so is its answer."""
    messages = {
        node: Message(content, dst_node_id=node, message_type=kind, ttl=deadline, group_id=group)
        for node, content in contents.items()
    }
    down = {node: wire_bytes(message) for node, message in messages.items()}
    end = time.monotonic() + deadline
    sent = zip(grid.push_messages(list(messages.values())), messages, strict=False)
    waiting = {node: message for message, node in sent if message}
    answers = _answers(grid, waiting, end)
    return {node: _letter(node, waiting, answers, down[node], deadline) for node in messages}


def _answers(grid: Grid, waiting: dict[int, str], end: float) -> dict[int, Message]:
    """Whatever comes in time, by node. An error of the grid itself, such as a run that was stopped, is raised."""
    box: queue.Queue[tuple[int, Message | Exception]] = queue.Queue()
    pause = PAUSE * max(1.0, len(waiting) / AT_ONCE)

    def fetch(node: int, message: str) -> None:
        try:
            while time.monotonic() < end:
                for reply in grid.pull_messages([message]):
                    box.put((node, reply))
                    return
                time.sleep(pause)
        except Exception as error:
            box.put((node, error))

    for node, message in waiting.items():
        threading.Thread(target=fetch, args=(node, message), daemon=True).start()
    found: dict[int, Message] = {}
    while len(found) < len(waiting):
        try:
            node, answer = box.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(answer, Exception):
            raise answer
        found[node] = answer
    return found


def _letter(node: int, waiting: dict[int, str], answers: dict[int, Message], down: int, deadline: float) -> Letter:
    if node not in waiting:
        return Letter(None, "the message was not accepted", down, 0)
    if node not in answers:
        return Letter(None, f"no answer within {deadline:g} s", down, 0)
    reply, up = answers[node], wire_bytes(answers[node])
    if reply.has_error():
        return Letter(None, f"Flower says: {reply.error.reason} (code {reply.error.code})", down, up)
    return Letter(reply.content, "", down, up)
