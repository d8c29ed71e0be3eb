"""What is under way between two rounds of asynchronous training: plain values, so that a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from fedge.edge.shelf import Shelf

Sizes = dict[str, Tensor]  # "clients" [K], ascending, and the "sizes" [K, 2] of the large and the small parts of each
NOT_FINITE = "its upload is not finite"
Flight = tuple[float, int, int, bool, float]  # when it ends, the dispatch, the client, whether it answers, how long


@dataclass
class Underway:
    """Dispatches are numbered. A job is one row of one dispatch: number * rows + row; a version likewise.

    `untrained` has, for every job not computed yet, its client and the version it started from. `sent` has the places
    of these versions on the shelf `models`, and `places` those of the uploads that were computed on the shelf
    `uploads`. `buffers` are the answered jobs of every row that wait for the server's step.
    """

    now: float = 0.0
    round: int = 0  # the last one that counted
    number: int = 0  # of the next dispatch
    trained: int = 0  # the dispatches before this one were computed
    versions: list[int] = field(default_factory=list)  # by row
    flights: list[Flight] = field(default_factory=list)  # a heap
    untrained: dict[int, tuple[int, int]] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    models: Shelf = field(default_factory=Shelf)
    places: dict[int, int] = field(default_factory=dict)
    uploads: Shelf = field(default_factory=Shelf)
    bad: dict[int, tuple[int, str]] = field(default_factory=dict)  # of jobs whose upload does not count: client and why
    sizes: Sizes = field(default_factory=dict)  # of every client's last upload
    buffers: list[list[int]] = field(default_factory=list)  # by row

    @classmethod
    def read(cls, plain: Mapping[str, Any], round: int) -> Underway:
        """A copy that may be changed, for a round."""
        if "uploads" not in plain:
            raise ValueError(
                "this state of an asynchronous run was written by an earlier version of fedge, which kept what is "
                "under way in another form: end the run with that version, or start it anew"
            )
        found = cls(**{one.name: _copied(plain[one.name]) for one in fields(cls) if one.name in plain})
        found.round = plain.get("round", round - 1)
        # States without sizes are of an earlier version, and have the clients of uploads that are not finite alone.
        found.bad = {job: (one, NOT_FINITE) if isinstance(one, int) else one for job, one in found.bad.items()}
        return found

    def plain(self) -> dict[str, Any]:
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value.plain() if isinstance(value, Shelf) else value for name, value in found.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return Shelf.read(value) if "stacks" in value else dict(value)
    return [list(one) if isinstance(one, list) else one for one in value] if isinstance(value, list) else value
