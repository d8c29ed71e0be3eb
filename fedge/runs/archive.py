"""An archive of tensors is read if it is as `torch.save` lays it out: then it takes as much memory as the file.

`zipfile` and torch do not find the same directory in every archive, and a directory may name one record many times. So
it is read here, as torch reads it, and whatever torch would not write is refused.
"""

from __future__ import annotations

import io
import struct
from typing import Any

ENTRY, LOCAL = b"PK\1\2", b"PK\3\4"
END = struct.Struct("<4sHHHHIIH")  # of the archive: disks, entries, size and place of the directory, comment
END64 = struct.Struct("<4sQHHIIQQQQ")  # the same in 64 bits; torch writes both
LOCATOR = struct.Struct("<4sIQI")  # where the latter is
FIELDS = struct.Struct("<4sHHHHHHIIIHHHHHII")  # of an entry in the directory
HEAD = struct.Struct("<4sHHHHHIIIHH")  # before a record
FULL16, FULL32 = (1 << 16) - 1, (1 << 32) - 1  # the number is in the 64-bit form
ROOM = 1 << 20  # bytes that may be read beside the file's own, for a few headers are read twice


class NotAsWritten(ValueError):
    """An archive that torch does not write; says what it has."""


class Counted(io.BytesIO):
    """A file that cannot be read several times over: a record has many names, as torch takes `a` for `A`."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self._left = 2 * len(content) + ROOM

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        self._count(len(found))
        return found

    def readinto(self, buffer: Any, /) -> int:
        found = super().readinto(buffer)
        self._count(found)
        return found

    def _count(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise NotAsWritten("a record under many names")


def check_layout(body: bytes) -> None:
    """Records one after another, none packed, then one directory of them and its ends, and nothing behind."""
    try:
        first, last, entries = _directory(body)
        free = 0  # where the next record may begin
        for _ in range(entries):
            first, free = _record(body, first, free)
    except struct.error:
        raise NotAsWritten("an entry that is cut off") from None
    if first != last:
        raise NotAsWritten("a directory of another length")


def _directory(body: bytes) -> tuple[int, int, int]:
    """Where it begins and ends, and how many entries it has: all ends of the archive agree."""
    at = body.rfind(b"PK\5\6")  # torch takes the last one too
    long = at - LOCATOR.size - END64.size
    if long < 0:
        raise NotAsWritten("no end")
    _, disk, other, here, entries, size, place, comment = END.unpack_from(body, at)
    mark, length, _, _, disk64, other64, here64, entries64, size64, place64 = END64.unpack_from(body, long)
    locator = LOCATOR.unpack_from(body, long + END64.size)
    if at + END.size + comment != len(body) or mark != b"PK\6\6" or length != END64.size - 12:
        raise NotAsWritten("ends of another kind")
    if locator != (b"PK\6\7", 0, long, 1) or any((disk, other, disk64, other64)):
        raise NotAsWritten("ends of another kind")
    short = tuple(map(min, (entries64, size64, place64), (FULL16, FULL32, FULL32)))
    if (entries, size, place) != short or here != entries or here64 != entries64 or place64 + size64 != long:
        raise NotAsWritten("two directories")
    return place64, long, entries64


def _record(body: bytes, at: int, free: int) -> tuple[int, int]:
    """Where the next entry begins, and where the record of this one ends; it does not begin before `free`."""
    mark, _, _, _, method, _, _, _, packed, size, name, extra, comment, _, _, _, place = FIELDS.unpack_from(body, at)
    begin = at + FIELDS.size
    end = begin + name + extra + comment
    packed, size, place = _long(body[begin + name : begin + name + extra], [size, packed, place])
    head, _, _, own_method, _, _, _, _, _, own_name, own_extra = HEAD.unpack_from(body, place)
    title = place + HEAD.size
    data = title + own_name + own_extra
    if mark != ENTRY or head != LOCAL or body[begin : begin + name] != body[title : title + own_name]:
        raise NotAsWritten("an entry without its record")
    if method or own_method or packed != size:
        raise NotAsWritten("a compressed file")
    if place < free or data + size > at:
        raise NotAsWritten("a record under many names")
    return end, data + size


def _long(extra: bytes, numbers: list[int]) -> tuple[int, int, int]:
    """Packed size, size and place; those that 32 bits do not hold are in a field of the entry of their own."""
    kind, length = struct.unpack_from("<HH", extra) if FULL32 in numbers else (1, 0)
    more = iter(struct.unpack_from(f"<{length // 8}Q", extra, 4) if length else ())
    size, packed, place = (next(more, -1) if one == FULL32 else one for one in numbers)
    if kind != 1 or min(size, packed, place) < 0:
        raise NotAsWritten("an entry without its record")
    return packed, size, place
