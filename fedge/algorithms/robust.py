"""Any algorithm with another rule for combining uploads; the rules and their papers are in `fedge.combine`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fedge.algorithms.wrapper import Wrapper
from fedge.combine import BoundedMean, ClippedMean, Gather, Krum, Mean, Median, TrimmedMean
from fedge.core import Algorithm, Ask, Combine, Flow


@dataclass(frozen=True, eq=False)
class Robust(Wrapper[Any]):
    """The inner algorithm, whose asks are combined by `combine` in place of the weighted mean.

    A few lying clients then move the model little, whatever they send. The price is what honest but unusual clients
    would have added. The server's arithmetic stays the inner algorithm's: it reads the combined upload as its mean. A
    rule that needs all uploads together holds those of the whole cohort in memory.

    Bytes per round: those of the inner algorithm.
    """

    inner: Algorithm[Any]
    combine: Mean | Median | TrimmedMean | Krum | ClippedMean | BoundedMean | Combine = field(default_factory=Median)

    def __post_init__(self) -> None:
        if not isinstance(self.combine, Combine):
            raise TypeError(f"combine is {self.combine!r}, it must be a rule such as fedge.Median() or fedge.Krum(2)")
        if not isinstance(self.combine, Mean) and (why := self.inner.no_rule_limits()) is not None:
            raise ValueError(why)

    def setup(self, state: Any) -> Flow[Any]:
        return altered(self.inner.setup(state), self._changed)

    def round(self, state: Any) -> Flow[Any]:
        changed: list[Ask] = []
        after = yield from altered(self.inner.round(state), lambda ask: self._changed(ask, changed))
        if not changed:
            raise ValueError(
                f"{type(self.inner).__name__} gathers single uploads and combines them itself: {self.combine} would "
                "change nothing; take Robust away"
            )
        return after

    def _changed(self, ask: Ask, seen: list[Ask] | None = None) -> Ask:
        """With this rule; asks that gather are the inner algorithm's own business."""
        if isinstance(ask.combine, Gather):
            return ask
        if seen is not None:
            seen.append(ask)
        return replace(ask, combine=self.combine)


def altered(flow: Flow[Any], change: Callable[[Ask], Ask]) -> Flow[Any]:
    """The same flow with every one of its asks changed."""
    reply: Any = None
    while True:
        try:
            wanted = flow.send(reply)
        except StopIteration as end:
            return end.value
        if isinstance(wanted, Ask):
            reply = yield change(wanted)
        elif isinstance(wanted, tuple):
            reply = yield tuple(change(ask) for ask in wanted)
        else:
            reply = yield wanted
