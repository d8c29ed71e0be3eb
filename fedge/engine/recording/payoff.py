"""Whether a recording pays: what it would save in the rest of the run, against what it costs.

A step of some kind took s seconds in all since the run began. If the rest of the run is `ahead` times as long as what
went before, it will take about s * ahead more, of which a recording saves a share. What a recording costs follows the
number of tensor operations in it:

    record  when  saves * ahead * s  >=  seconds per operation * operations

Two recordings serve stacks of all heights (`heights`), unless the step has operations of its own for each client of the
stack: then it has more of them in a higher stack, and every height is a kind of its own.

Clients of many sizes have steps of many shapes, and in a run of a dozen rounds most of them are rare. Recording changes
no number, so what a clock says here changes none either.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

SAVES = 0.25  # of the time of a step, at least: a recorded one takes 0.2 to 0.8 of it
PER_OPERATION = 4e-4  # seconds, until a recording was made; then what it took is known

Ahead = Callable[[], float]  # how many times as long as what went before the rest of the run is


def endless() -> float:
    """Of a run of unknown length: everything that comes often is worth a recording."""
    return math.inf


class Operations(TorchDispatchMode):
    """Within it, tensor operations are counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Step(NamedTuple):
    """The shapes of a step; of a stack also those without its height."""

    shapes: Any
    family: Any = None
    height: int = 0


class Payoff:
    """What the steps of some kinds took, and what their recordings took."""

    def __init__(self, ahead: Ahead = endless) -> None:
        self.ahead = ahead
        self._seconds: defaultdict[Any, float] = defaultdict(float)
        self._calls: Counter[Any] = Counter()
        self._operations: dict[Any, int] = {}  # by shapes
        self._stacks: defaultdict[Any, dict[int, int]] = defaultdict(dict)  # operations by family and height
        self._apart: set[Any] = set()  # families whose heights have little in common
        self._recordings: list[float] = []  # seconds per operation

    def took(self, step: Step, seconds: float, operations: int | None = None) -> None:
        """A step that was not recorded."""
        for kind in (step.shapes, step.family)[: 1 if step.family is None else 2]:
            self._seconds[kind] += seconds
            self._calls[kind] += 1
        if operations is None:
            return
        self._operations[step.shapes] = operations
        if step.height > 1:  # a stack of one is often computed in another way
            known = self._stacks[step.family]
            known[step.height] = operations
            if len(set(known.values())) > 1:
                self.part(step.family)

    def part(self, family: Any) -> None:
        """Recordings for heights of a stack do not follow from each other."""
        self._apart.add(family)

    def calls(self, step: Step) -> int:
        """Steps of the kind that were not recorded."""
        return self._calls[self._kind(step)]

    def timed(self, step: Step, warm: int, function: Callable[..., Any], *args: Any) -> Any:
        """What the step gives, which is recorded after `warm` calls at the earliest; how long it took is noted."""
        begin = time.perf_counter()
        with Operations() if self._wants_operations(step, warm) else nullcontext() as operations:
            found = function(*args)
        self.took(step, time.perf_counter() - begin, operations.count if operations else None)
        return found

    def _wants_operations(self, step: Step, warm: int) -> bool:
        """Whether operations are worth counting: there is something to weigh, and it will soon be weighed."""
        known = step.shapes in self._operations or not warm
        return not known and self.ahead() < math.inf and self.calls(step) >= warm

    def recorded(self, step: Step, seconds: float) -> None:
        """A recording was made."""
        if step.shapes in self._operations:
            self._recordings.append(seconds / max(1, self._operations[step.shapes]))

    def pays(self, step: Step, warm: int) -> bool:
        """Whether recordings pay that serve all steps of the kind; what is recorded at once is not weighed."""
        if not warm or (ahead := self.ahead()) == math.inf:
            return True
        kind, operations = self._kind(step), self._operations.get(step.shapes)
        if operations is None:
            return False
        several = 2 if kind is not step.shapes and len(self._stacks[kind]) > 1 else 1
        return SAVES * ahead * self._seconds[kind] >= several * operations * self._per_operation()

    def _kind(self, step: Step) -> Any:
        return step.shapes if step.family is None or step.family in self._apart else step.family

    def _per_operation(self) -> float:
        return sum(self._recordings) / len(self._recordings) if self._recordings else PER_OPERATION
