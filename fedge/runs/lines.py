"""Files of one JSON object per line, with a checksum of every line kept apart from them.

A checkpoint holds the checksums up to its round, so that a file which was shortened or changed afterwards is found out,
and the line that is not what was written can be named.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedge.runs import atomic, regular

Record = dict[str, Any]


class DamagedFile(ValueError):
    """A file that is not as it was written; says which line."""


class Lines:
    """One such file, and what was written into it."""

    def __init__(self, path: Path) -> None:
        self.path, self._sums = path, list[int]()

    def begin(self) -> None:
        with open(self.path, "wb", opener=atomic.in_place):
            pass
        self._sums = []

    def append(self, records: Iterable[Record]) -> None:
        """Whole lines in one write, so that a kill leaves at most one torn line at the end."""
        lines = [json.dumps(finite(one)).encode() + b"\n" for one in records]
        with open(self.path, "ab", opener=atomic.in_place) as file:
            file.write(b"".join(lines))
        self._sums += map(zlib.crc32, lines)

    def sums(self) -> Tensor:
        """The checksums of all lines, for a checkpoint: 4 bytes each."""
        return torch.from_numpy(np.array(self._sums, dtype=np.uint32).view(np.int32))

    def read(self, sums: Tensor) -> list[Record]:
        """The lines that have these checksums, and no others."""
        expected = sums.numpy().view(np.uint32).tolist()
        lines = self._lines()[: len(expected)]
        for number, (line, checksum) in enumerate(zip(lines, expected, strict=False), 1):
            if zlib.crc32(line) != checksum:
                raise DamagedFile(f"line {number} of {self.path.name} is not what was written there")
        if len(lines) < len(expected):
            raise DamagedFile(f"{self.path.name} has {len(lines)} of the {len(expected)} lines that were written")
        return self._parsed(lines)

    def read_until(self, round: int) -> list[Record]:
        """The lines up to a round, of a run whose checkpoint has no checksums; a torn line is the end."""
        lines = [line for line in self._lines() if line.endswith(b"\n")]
        return [record for record in self._parsed(lines) if record["round"] <= round]

    def cut(self, count: int) -> None:
        """Keep so many lines."""
        kept = self._lines()[:count]
        atomic.write_atomically(self.path, b"".join(kept))
        self._sums = [zlib.crc32(line) for line in kept]

    def _lines(self) -> list[bytes]:
        try:
            raw = regular.content(self.path)
        except FileNotFoundError:
            raise DamagedFile(f"{self.path.name} is missing") from None
        except (OSError, MemoryError) as error:
            why = getattr(error, "strerror", None) or "it is too large"
            raise DamagedFile(f"{self.path.name} cannot be read: {why}") from None
        *whole, rest = raw.split(b"\n")
        return [line + b"\n" for line in whole] + ([rest] if rest else [])

    def _parsed(self, lines: list[bytes]) -> list[Record]:
        found = []
        for number, line in enumerate(lines, 1):
            record = parse(line)
            if record is None or type(record.get("round")) is not int:
                raise DamagedFile(f"line {number} of {self.path.name} is not the object of a round: {line[:40]!r}")
            found.append(record)
        return found


def parse(line: bytes | str) -> Record | None:
    """The object of a line, None if it is not one, also if it is nested without end or has numbers without end."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def finite(value: Any) -> Any:
    """JSON has no word for what is not finite: null."""
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
