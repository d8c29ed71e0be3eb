"""Uploads on their way: encoded by the client, decoded by the server before anything is combined."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor

from fedge import tree
from fedge.core import Params, Payload, Task
from fedge.keys import CODEC, fold_tensor

SMALL = 64  # numbers: a part with fewer of them, such as a few losses, travels as it is


class Coded(NamedTuple):
    """One upload: as it travels, as the server sees it, and what the codec left out, by part."""

    sent: Payload
    seen: Payload
    left: Payload


def is_coded(task: Task, name: str, part: Params) -> bool:
    """Whether the codec sees a part of an upload; not one that has to lie between two ends: counts, shares, moments."""
    bounded = any(math.isfinite(one.high) and one.part == name for one in task.ranges)
    return not bounded and tree.size(part) >= SMALL and all(leaf.is_floating_point() for leaf in part.values())


def split(upload: Payload, losses: Collection[str] = ()) -> tuple[Payload, Payload]:
    """(what rules look at, what is bounded number by number): counters beside a model's numbers, and losses.

    Parts with fewer than SMALL numbers are such counters, unless there is no larger one. Every tensor has a leading job
    axis.
    """
    others = {name: part for name, part in upload.items() if name not in losses}
    large = {name: part for name, part in others.items() if _numbers(part) >= SMALL} or others
    return large, {name: part for name, part in upload.items() if name not in large}


def _numbers(part: Params) -> int:
    return sum(leaf.numel() // leaf.shape[0] for leaf in part.values())


def codec_key(client_key: Tensor, position: int, row: Tensor) -> Tensor:
    """The address of what a codec draws: the client's work in a phase, the task's position in the ask, the row."""
    return fold_tensor(client_key, CODEC, position, row)


def left_out(task: str, part: str) -> str:
    """The name under which a client remembers what its codec left out of a part of a task's upload."""
    return f"left out of {task}/{part}"


def code(task: Task, upload: Payload, left: Payload, key: Tensor) -> Coded:
    """Encode one client's upload, with what was left out of its last one (`left`: zeros at first)."""
    assert task.codec is not None
    found = Coded(dict(upload), dict(upload), {})
    for place, (name, part) in enumerate(upload.items()):
        if not is_coded(task, name, part):
            continue
        whole = tree.add(part, left[name]) if task.feedback else part
        found.sent[name] = task.codec.encode(whole, fold_tensor(key, place).to(key.device))
        found.seen[name] = task.codec.decode(found.sent[name], part)
        if task.feedback:
            found.left[name] = tree.sub(whole, found.seen[name])
    return found


def decode(task: Task, sent: Payload, like: Payload) -> Payload:
    """What the server sees of one client's upload; `like` is the upload before it was encoded."""
    if task.codec is None:
        return sent
    coded = {name for name, part in like.items() if is_coded(task, name, part)}
    return {name: task.codec.decode(sent[name], part) if name in coded else sent[name] for name, part in like.items()}


def sent_template(task: Task, like: Payload, key: Tensor) -> Payload:
    """What the encoding of such an upload looks like."""
    if task.codec is None:
        return like
    coded = {name for name, part in like.items() if is_coded(task, name, part)}
    return {name: task.codec.encode(part, key) if name in coded else part for name, part in like.items()}
