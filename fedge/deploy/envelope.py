"""Our bytes inside Flower's messages: a head of plain values, and blobs that Flower cuts into chunks.

Keys and sizes are all that Flower sees. The blobs are those of the loop-back link, so that both carry the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedge.engine.links import wire

HEAD, BLOBS, LIMIT = "fedge", "fedge.blobs", "fedge.limit"


def pack(head: Mapping[str, Any], blobs: Mapping[str, bytes] | None = None) -> RecordDict:
    """A head of numbers, strings, lists, dicts and tensors, and named blobs."""
    records = {HEAD: ConfigRecord({"head": wire.encode(dict(head))})}
    if blobs:
        arrays = {name: Array("uint8", (len(blob),), "fedge", blob) for name, blob in blobs.items()}
        return RecordDict(records | {BLOBS: ArrayRecord(arrays)})
    return RecordDict(records)


def unpack(records: RecordDict) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What `pack` wrote; anything else is a ValueError."""
    try:
        head = wire.decode(records.config_records[HEAD]["head"])
        blobs = records.array_records.get(BLOBS, {})
        found = {str(name): bytes(array.data) for name, array in blobs.items()}
    except Exception as error:
        raise ValueError(f"the message cannot be read: {type(error).__name__}") from error
    if not isinstance(head, dict):
        raise ValueError(f"the message cannot be read: its head is a {type(head).__name__}")
    return head, found


def allow(records: RecordDict, seconds: float) -> RecordDict:
    """The same message that says how long its answer may take, which is less than Flower keeps it."""
    return RecordDict({**records, LIMIT: ConfigRecord({"seconds": float(seconds)})})


def allowed(message: Message) -> float:
    """The seconds that the server waits for the answer."""
    limit = message.content.config_records.get(LIMIT, {}).get("seconds")
    return limit if isinstance(limit, float) else message.metadata.ttl


def short(text: Any) -> str:
    """What a device wrote, as one line of bounded length without anything that a terminal would act on."""
    plain = "".join(one if one.isprintable() else " " for one in str(text)[:2000])
    return " ".join(plain.split())[:500]


def wire_bytes(thing: Any) -> int:
    """The bytes of a message as Flower stores and sends them, every nested object once; HTTP and TLS add theirs."""
    children = (thing.children or {}).values()
    return len(thing.deflate()) + sum(wire_bytes(child) for child in children)
