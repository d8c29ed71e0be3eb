"""What is under way between two rounds of asynchronous training: plain values, so that a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

Flight = tuple[float, int, int, bool, float]  # when it ends, the dispatch, the client, whether it answers, how long
Job = tuple[int, int]  # the number of a dispatch, and a row


@dataclass
class Underway:
    """Dispatches are numbered; a job is one row of one dispatch.

    `untrained` has, for every job not computed yet, its client and the version it started from; `sent` these versions,
    by (row, version), and `batches` the uploads that were computed, with the place of every job that still needs its
    own. `buffers` are the answered jobs of every row that wait for the server's step.
    """

    now: float = 0.0
    number: int = 0  # of the next dispatch
    versions: list[int] = field(default_factory=list)  # by row
    flights: list[Flight] = field(default_factory=list)  # a heap
    untrained: dict[Job, tuple[int, int]] = field(default_factory=dict)  # client and version
    sent: dict[tuple[int, int], Any] = field(default_factory=dict)
    started: dict[Job, tuple[int, int]] = field(default_factory=dict)  # client and version, once it is computed
    batches: dict[int, Any] = field(default_factory=dict)  # uploads, weights, what they started from, which are good
    places: dict[Job, tuple[int, int]] = field(default_factory=dict)  # batch and position
    needed: dict[int, int] = field(default_factory=dict)  # by batch: how many of its jobs were not used yet
    buffers: list[list[Job]] = field(default_factory=list)  # by row

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Underway:
        """A copy that may be changed."""
        return cls(**{one.name: _copied(plain[one.name]) for one in fields(cls)})

    def plain(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value)
    return [list(one) if isinstance(one, list) else one for one in value] if isinstance(value, list) else value
