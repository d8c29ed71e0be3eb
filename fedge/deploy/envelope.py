"""Our bytes inside Flower's messages: a head of plain values, and blobs that Flower cuts into chunks.

Keys and sizes are all that Flower sees. The blobs are those of the loop-back link, so that both carry the same.

Flower's SuperLink knows objects by their hash, and believes whoever names one first what is in it. So heads and limits
hold a few random bytes, and so does every chunk that the server sends: nobody can name those of the next message.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE

from fedge.engine.links import wire

HEAD, BLOBS, LIMIT = "fedge", "fedge.blobs", "fedge.limit"
ONCE = "once"  # in a record: random bytes, which nobody looks at
STAMP, STAMPED, SHORTEST = 16, "fedge/", 1 << 12  # bytes at the head of every chunk; what such an array says; a chunk
SAID = ("client", "examples", "rows", "seconds", "error", "forgot", "kept")  # what the head of an answer may say
SHOWN = 60  # letters of a name that a device made up
MOST = 1 << 20  # bytes of the head of an answer; what is larger takes long to read, and says nothing


def stamp() -> bytes:
    """For the messages of a phase: what is the same in several of them is one object."""
    return secrets.token_bytes(STAMP)


def pack(head: Mapping[str, Any], blobs: Mapping[str, bytes] | None = None, once: bytes = b"") -> RecordDict:
    """A head of numbers, strings, lists, dicts and tensors, and named blobs; `once` is a stamp on all their chunks."""
    records = {HEAD: ConfigRecord({"head": wire.encode(dict(head)), ONCE: secrets.token_bytes(STAMP)})}
    if blobs:
        return RecordDict(records | {BLOBS: ArrayRecord({name: _array(blob, once) for name, blob in blobs.items()})})
    return RecordDict(records)


def _array(blob: bytes, once: bytes) -> Array:
    if not once:
        return Array("uint8", (len(blob),), "fedge", blob)
    step = FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE - STAMP
    data = b"".join(once + blob[start : start + step] for start in range(0, max(1, len(blob)), step))
    return Array("uint8", (len(data),), f"{STAMPED}{step}", data)


def _blob(array: Array) -> bytes:
    """The bytes of an array without its stamps."""
    if not array.stype.startswith(STAMPED):
        return bytes(array.data)
    step = max(SHORTEST, int(array.stype.removeprefix(STAMPED))) + STAMP
    return b"".join(array.data[start + STAMP : start + step] for start in range(0, len(array.data), step))


def unpack(records: RecordDict) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What `pack` wrote; anything else is a ValueError."""
    try:
        head = wire.decode(records.config_records[HEAD]["head"])
        blobs = records.array_records.get(BLOBS, {})
        found = {str(name): _blob(array) for name, array in blobs.items()}
    except Exception as error:
        raise ValueError(f"the message cannot be read: {type(error).__name__}") from error
    if not isinstance(head, dict):
        raise ValueError(f"the message cannot be read: its head is a {type(head).__name__}")
    return head, found


def opened(records: RecordDict, wanted: Iterable[int] = ()) -> tuple[dict[str, Any], dict[int, bytes]]:
    """What a device answered: its head, and the blobs at the wanted places; anything beside them is a ValueError.

    Names are looked at before what they name: one array can have any number of them, and is unpacked for each.
    """
    heads, places = records.config_records.get(HEAD, {}), {str(place): place for place in wanted}
    _refuse(name for name in records if name not in (HEAD, BLOBS))
    _refuse(name for name in heads if name not in ("head", ONCE))
    _refuse(name for name in records.array_records.get(BLOBS, {}) if name not in places)
    raw = heads.get("head")
    if isinstance(raw, bytes) and len(raw) > MOST:
        raise ValueError(f"the head of its answer has {len(raw)} bytes, at most {MOST} are read")
    head, blobs = unpack(records)
    _refuse(name for name in head if name not in SAID)
    return head, {places[name]: blob for name, blob in blobs.items()}


def _refuse(unknown: Iterable[Any]) -> None:
    for name in unknown:
        raise ValueError(f"its answer has a part that nobody asked for: {short(name)[:SHOWN]!r}")


def allow(records: RecordDict, seconds: float) -> RecordDict:
    """The same message that says how long its answer may take, which is less than Flower keeps it."""
    return RecordDict({**records, LIMIT: ConfigRecord({"seconds": float(seconds), ONCE: secrets.token_bytes(16)})})


def allowed(message: Message) -> float:
    """The seconds that the server waits for the answer."""
    limit = message.content.config_records.get(LIMIT, {}).get("seconds")
    return limit if isinstance(limit, float) else message.metadata.ttl


def short(text: Any) -> str:
    """What a device wrote, as one line of bounded length without anything that a terminal would act on.

    Of a list or a tensor the kind alone: to write out a megabyte of them takes seconds.
    """
    plainly = text is None or isinstance(text, str | int | float | BaseException)
    words = str(text) if plainly else f"a {type(text).__name__}"
    plain = "".join(one if one.isprintable() else " " for one in words[:2000])
    return " ".join(plain.split())[:500]


def wire_bytes(thing: Any) -> int:
    """The bytes of a message as Flower stores and sends them, every nested object once; HTTP and TLS add theirs.

    Of our own messages: of another's, which may nest without end, those are booked that came.
    """
    found: dict[str, Any] = {}
    _collect(thing, found)
    return len(thing.deflate()) + sum(len(one.deflate()) for one in found.values())


def _collect(thing: Any, found: dict[str, Any]) -> None:
    """All that is nested in a thing by its name, which is a hash: others may hold the same, any number of times."""
    for name, child in (thing.children or {}).items():
        if name not in found:
            found[name] = child
            _collect(child, found)
