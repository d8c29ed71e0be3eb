"""Devices from a CSV file, one row per device."""

from __future__ import annotations

import csv
import io
import math
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedge import atomic
from fedge.checks import nearest
from fedge.edge.devices import KIND, LEAST, MOST, Devices, Fleet
from fedge.edge.draws import Array, uniform
from fedge.keys import DEVICE, fold

NEEDED = ("flops", "down", "up")
OPTIONAL = {
    "compute_watts": 0.0,
    "receive_watts": 0.0,
    "transmit_watts": 0.0,
    "memory": math.inf,
    "latency": 0.0,
    "availability": 1.0,
}
COLUMNS = (*NEEDED, *OPTIONAL)
SLOWEST = 1e5  # FLOP/s: a hundredth of a slow microcontroller; less is meant in another unit
LARGEST = 1 << 30  # bytes: some ten million devices


@dataclass(frozen=True)
class Table(Fleet):
    """Row k of the file is the device of client k. Of a file with fewer rows than clients, every client draws one.

    Rows after that of the last client are not used. Columns: `flops` (FLOP/s, at least 1e5), `down` and `up` (bit/s);
    if they are there, `compute_watts`, `receive_watts`, `transmit_watts`, `memory` (bytes), `latency` (seconds per
    phase), `availability` (a probability), and `kind` (any word).
    """

    file: str
    clients: int
    seed: int = 0
    rows: Array = field(init=False, repr=False, compare=False)  # [columns, rows]
    kind: Array = field(init=False, repr=False, compare=False)
    kinds: tuple[str, ...] = field(init=False, repr=False)
    checksum: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lines = _read(Path(self.file))
        words = [line.get("kind") or "device" for line in lines]
        places = {word: place for place, word in enumerate(dict.fromkeys(words))}
        numbers = [[_number(self.file, at, name, line) for name in COLUMNS] for at, line in enumerate(lines, 2)]
        object.__setattr__(self, "rows", np.array(numbers, dtype=np.float64).T)
        object.__setattr__(self, "kinds", tuple(places))
        object.__setattr__(self, "kind", np.array([places[word] for word in words]))
        object.__setattr__(self, "checksum", zlib.crc32(repr(words).encode(), zlib.crc32(self.rows.tobytes())))

    def devices(self, clients: Array) -> Devices:
        row = clients if self.rows.shape[1] >= self.clients else self._drawn(clients)
        return Devices._make([*self.rows[:, row], self.kind[row]])

    def _drawn(self, clients: Array) -> Array:
        rows: Array = (uniform(fold(self.seed, DEVICE), clients, KIND) * self.rows.shape[1]).astype(np.int64)
        return rows

    @property
    def told(self) -> str:
        """What becomes of rows that are not as many as clients, in a line; empty: every client has its own."""
        count = self.rows.shape[1]
        if count == self.clients:
            return ""
        head = f"{self.file} has {count:,} rows for {self.clients:,} clients: "
        if count > self.clients:
            return f"{head}the last {count - self.clients:,} are not used"
        used = len(np.unique(self._drawn(np.arange(self.clients))))
        return f"{head}each client draws one, and {used:,} of the rows are drawn"


def write(path: Path | str, found: Devices, kinds: tuple[str, ...]) -> None:
    """A file that `Table` reads back as these devices; one that was there is replaced once this one is whole."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["kind", *COLUMNS])
    for kind, *numbers in zip(found.kind, *found[: len(COLUMNS)], strict=True):
        writer.writerow([kinds[kind], *(repr(float(number)) for number in numbers)])
    place = Path(path)
    if place.exists() and not place.is_file():  # such as /dev/stdout
        place.write_text(text.getvalue(), "utf-8", newline="")
    else:
        atomic.write_atomically(place.resolve(), text.getvalue().encode())


def _read(path: Path) -> list[dict[str, str]]:
    try:
        text = _text(path)
    except OSError as error:
        raise ValueError(f"cannot read the devices in {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read the devices in {path}: it is no text in UTF-8, see byte {error.start}") from None
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    try:
        head, lines = list(reader.fieldnames or []), list(reader)
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
    _check_separator(path, text)
    for name in head:
        if head.count(name) > 1:
            raise ValueError(f"{path} has the column {name!r} {head.count(name)} times: one of them is meant")
    for name in NEEDED:
        if name not in head:
            raise ValueError(f"{path} has no column {name!r}, it has {head}: needed are {', '.join(NEEDED)}")
    for name in head:
        if name not in (*COLUMNS, "kind"):
            known = ", ".join(("kind", *COLUMNS))
            raise ValueError(f"{path} has an unknown column {name!r}{nearest(name, COLUMNS)}: known are {known}")
    if not lines:
        raise ValueError(f"{path} has no rows: write one per device")
    for at, line in enumerate(lines, 2):
        if None in line:
            raise ValueError(f"{path}, line {at}: there are more numbers than the {len(head)} columns {head}")
        if None in line.values():
            raise ValueError(f"{path}, line {at}: there are fewer fields than the {len(head)} columns {head}")
    return lines


def _check_separator(path: Path, text: str) -> None:
    """What a spreadsheet may write in place of commas, and a file with nothing in it."""
    lines = text.split("\n", 1)
    if not text.strip():
        raise ValueError(f"{path} is empty: write {','.join(NEEDED)} in the first line, and a line for each device")
    for mark, called in ((";", "semicolons"), ("\t", "tabs")):
        if mark in lines[0] and "," not in lines[0]:
            raise ValueError(
                f"{path} has {called} between its columns: write commas, and points in numbers (1.5, not 1,5), as in "
                f"{','.join(NEEDED)}"
            )


def _text(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise ValueError(f"cannot read the devices in {path}: it is no file")
    if path.stat().st_size > LARGEST:
        raise ValueError(f"cannot read the devices in {path}: it has {path.stat().st_size} bytes, at most {LARGEST}")
    return path.read_text("utf-8-sig")


def _number(file: str, line: int, name: str, row: dict[str, str]) -> float:
    text = (row.get(name) or "").strip()
    if not text and name in OPTIONAL:
        return OPTIONAL[name]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    needed, boundless = name in NEEDED, name == "memory" and value == math.inf
    if name == "flops" and value < SLOWEST <= value * 1e9:
        meant = f"{value * 1e9:g}".replace("e+", "e")
        raise ValueError(
            f"{file}, line {line}: flops is {text!r}, but it is in FLOP/s and at least {SLOWEST:g}: write {meant} for "
            f"{value:g} GFLOP/s"
        )
    floor = SLOWEST if name == "flops" else LEAST
    least, most = floor if needed else 0.0, 1.0 if name == "availability" else MOST
    if not (least <= value <= most or boundless):
        wanted = "a number above 0" if needed else f"a number of at least 0{' and at most 1' if most == 1 else ''}"
        wanted += f" (from {floor:g} to {MOST:g})" if value > 0 and most == MOST and math.isfinite(value) else ""
        raise ValueError(f"{file}, line {line}: {name} is {text!r}, it must be {wanted}")
    return value
