"""The ledger: bytes that crossed a link, counted where they cross and nowhere else.

What is counted is payload: the raw size of every tensor that is sent or uploaded, an upload's weight included. Framing,
task names and addresses are not. A link that passes messages reports beside it what they took on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field

from fedge.core import Payload


@dataclass(frozen=True)
class Row:
    """One ask of one phase. `down` sends every client its own copy; `broadcast` sends the whole once.

    `wire_down` and `wire_up` are the bytes of the messages themselves, None where there are none (the simulator).
    They depend on the transport, not on the algorithm, so two rows are equal without them.
    """

    round: int
    phase: int
    task: str
    clients: int
    down: int
    broadcast: int
    up: int
    wire_down: int | None = field(default=None, compare=False)
    wire_up: int | None = field(default=None, compare=False)


def payload_bytes(payload: Payload) -> int:
    return sum(leaf.nbytes for part in payload.values() for leaf in part.values())


@dataclass
class Ledger:
    """Rows in the order of events; iterate, index, or sum them."""

    rows: list[Row] = field(default_factory=list)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def total(self, round: int | None = None) -> dict[str, int]:
        """Bytes of one round, or of all."""
        chosen: Iterable[Row] = [r for r in self.rows if round is None or r.round == round]
        return {way: sum(getattr(row, way) for row in chosen) for way in ("down", "broadcast", "up")}

    def wire(self) -> dict[str, int] | None:
        """Bytes of all messages; None if no row knows its own."""
        known = [row for row in self.rows if row.wire_down is not None]
        if not known:
            return None
        return {way: sum(getattr(row, f"wire_{way}") or 0 for row in known) for way in ("down", "up")}

    def as_dicts(self) -> list[dict[str, int | str | None]]:
        return [asdict(row) for row in self.rows]
