"""Messages as bytes and back: tensors, numbers, texts and names, and nothing else.

    "fedge" 1 | length of the head, 4 bytes | head, JSON | the tensors' bytes, one after another

A head describes a nest of dicts, lists and tuples; a tensor in it is its type and its shape. Bytes that somebody else
wrote are read in time and memory proportional to their number: nothing is compressed, nothing is shared, keys are
texts and whole numbers below 2^31, whose hashes differ, and the sizes of all tensors must add up to what is there.
"""

from __future__ import annotations

import json
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAGIC = b"fedge\x01"
HEAD = 16 << 20  # bytes of a head at most
DEPTH, AXES = 24, 16
KEY, AXIS = 1 << 31, 1 << 60  # whole numbers below these: keys, and lengths of axes
TYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}
NAMES = {kind: name for name, kind in TYPES.items()}


class WireError(ValueError):
    """Bytes that are no message, or a message that cannot be bytes; says why."""


def encode(message: Any) -> bytes:
    tensors: list[Tensor] = []
    head = json.dumps(_described(message, tensors), separators=(",", ":")).encode()
    return b"".join([MAGIC, len(head).to_bytes(4, "little"), head, *map(_raw, tensors)])


def _described(thing: Any, tensors: list[Tensor]) -> Any:
    if isinstance(thing, Tensor):
        if thing.dtype not in NAMES or thing.layout != torch.strided:
            raise WireError(f"a tensor of type {thing.dtype} cannot travel")
        tensors.append(thing)
        return {"t": [NAMES[thing.dtype], *thing.shape]}
    if isinstance(thing, dict):
        if not all(map(_is_key, thing)):
            raise WireError("keys must be texts or whole numbers below 2^31")
        return {"d": [[key, _described(value, tensors)] for key, value in thing.items()]}
    if isinstance(thing, list | tuple):
        return {"l" if isinstance(thing, list) else "u": [_described(one, tensors) for one in thing]}
    if thing is None or isinstance(thing, bool | int | float | str):
        return thing
    raise WireError(f"a {type(thing).__name__} cannot travel")


def _is_key(key: Any) -> bool:
    return type(key) is str or (type(key) is int and abs(key) < KEY)


def _raw(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def decode(message: bytes | memoryview, most: int = HEAD) -> Any:
    """The message again; anything that `encode` did not write is a `WireError`, and so is a head of over `most` bytes.

    The bytes of tensors are copied at once, those of a head are looked at one by one.
    """
    start = len(MAGIC) + 4
    if len(message) < start or bytes(message[: len(MAGIC)]) != MAGIC:
        raise WireError(f"{len(message)} bytes that are no message of this version of fedge")
    size = int.from_bytes(message[len(MAGIC) : start], "little")
    if size > min(most, len(message) - start):
        raise WireError(f"its head says that it has {size} bytes, of {len(message)} in all and {most} at most")
    try:
        head = json.loads(bytes(message[start : start + size]))
    except (ValueError, RecursionError) as error:
        raise WireError(f"its head cannot be read: {type(error).__name__}") from None
    reader = _Reader(memoryview(message)[start + size :])
    found = reader.nest(head, DEPTH)
    if len(reader.rest):
        raise WireError(f"{len(reader.rest)} bytes are left over")
    return found


class _Reader:
    """Takes the tensors off the front of what is left."""

    def __init__(self, rest: memoryview) -> None:
        self.rest = rest

    def nest(self, head: Any, depth: int) -> Any:
        if head is None or isinstance(head, bool | int | float | str):
            return head
        if depth == 0 or not isinstance(head, dict) or len(head) != 1:
            raise WireError("its head is no description, or too deep")
        ((kind, parts),) = head.items()
        if not isinstance(parts, list) or kind not in ("t", "d", "l", "u"):
            raise WireError("its head is no description")
        if kind == "t":
            return self.tensor(parts)
        if kind == "d":
            return self.table(parts, depth - 1)
        found = [self.nest(one, depth - 1) for one in parts]
        return found if kind == "l" else tuple(found)

    def table(self, pairs: list[Any], depth: int) -> dict[str | int, Any]:
        found: dict[str | int, Any] = {}
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2 or not _is_key(pair[0]) or pair[0] in found:
                raise WireError("a key is no text or whole number, or is there twice")
            found[pair[0]] = self.nest(pair[1], depth)
        return found

    def tensor(self, about: list[Any]) -> Tensor:
        name, *shape = about or [None]
        fine = isinstance(name, str) and name in TYPES and len(shape) <= AXES
        if not fine or not all(type(axis) is int and 0 <= axis < AXIS for axis in shape):
            raise WireError("a tensor is described by no known type and shape")
        kind = TYPES[name]
        size = prod(shape) * kind.itemsize
        if size > len(self.rest):
            raise WireError(f"a tensor of {size} bytes, and {len(self.rest)} are left")
        if prod(axis for axis in shape if axis) > AXIS:
            raise WireError("a tensor is described by a shape that no tensor has")
        if size == 0:
            return torch.zeros(shape, dtype=kind)
        raw, self.rest = self.rest[:size], self.rest[size:]
        return torch.from_numpy(np.frombuffer(raw, np.uint8).copy()).view(kind).view(shape)
