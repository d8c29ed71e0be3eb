"""How large uploads are, what is usual in a cohort, and which numbers are far beyond it.

The size of an upload is its largest magnitude: of its large parts, those with at least 64 numbers (or the largest one
there is), and apart from them of the small ones beside these, such as counters. What is usual is the lower median over
the clients that answer for a task in a phase, so that one of two cannot raise it; of a client with several rows
(FedOVA) over its rows first, so that who claims many has no more say. If some are 0 it is at least the upper median of
the others, or 1 if that is less: these may be the liars alone, and one of them next to 0. For small parts it is at
least 1, for large ones at least a hundredth of the largest number in what clients were sent (`Intake`).

Losses at candidates (`Task.losses`) are no measure of a client: a candidate may overflow at one client alone. A number
that is far beyond the median of its place, or not finite, counts for so much that the candidate is not chosen:

    l_j  ->  ratio * max(1, median_j)  at most,  -ratio * max(1, min_i |median_i|)  at least
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fedge import tree
from fedge.core import Params, Payload
from fedge.engine.uploads import checks
from fedge.engine.uploads.coding import SMALL
from fedge.engine.uploads.streaming import sum_type

HEAVY = 1e7  # no weight is as large: sums of limited losses do not overflow
T = TypeVar("T")
Sizes = Sequence[float]  # of the large and the small parts of an upload


class Usual:
    """The sizes of the uploads of a task so far."""

    def __init__(self) -> None:
        self._known: list[list[float]] = [[], []]  # large and small: one size per client, ascending
        self._rows: list[dict[int, list[float]]] = []  # large and small: the sizes of every client, ascending

    @property
    def count(self) -> int:
        return len(self._known[0])

    @property
    def large(self) -> float:
        return _usual(0, self._known[0])

    def note(self, sizes: list[list[float]], clients: list[int] | None = None) -> None:
        """More uploads: large and small sizes by job; and whose they are, if clients have several."""
        if clients is not None:
            self._note_rows(sizes, clients)
            return
        for known, new in zip(self._known, sizes, strict=True):
            known += new if math.isfinite(sum(new)) else filter(math.isfinite, new)
            known.sort()

    def _note_rows(self, sizes: list[list[float]], clients: list[int]) -> None:
        self._rows = self._rows or [{} for _ in sizes]
        for known, rows, new in zip(self._known, self._rows, sizes, strict=True):
            for size, client in zip(new, clients, strict=True):
                if math.isfinite(size):
                    mine = rows.setdefault(client, [])
                    if mine:
                        known.pop(bisect_left(known, _lower(mine)))
                    insort(mine, size)
                    insort(known, _lower(mine))

    def doubts(self, sizes: list[list[float]], ratio: float) -> list[bool]:
        """Which uploads, of those noted last, have a size `beyond` so much."""
        found = [False] * len(sizes[0])
        for place, (new, known) in enumerate(zip(sizes, self._known, strict=True)):
            most = ratio * _usual(place, known)
            if most and known and (self._rows or known[-1] > most):  # else nobody's
                found = [one or most < size < math.inf for one, size in zip(found, new, strict=True)]
        return found

    def beyond(self, job: Sizes, ratio: float, least: float = 0.0) -> tuple[float, float] | None:
        """(size, what is usual) of the first size of an upload that is over `ratio` times the usual one.

        Of large parts `least` is usual at least.
        """
        for place, (size, known) in enumerate(zip(job, self._known, strict=True)):
            usual = _usual(place, known)
            usual = max(usual, least) if usual and place % 2 == 0 else usual
            if math.isfinite(size) and usual and size > ratio * usual:
                return size, usual
        return None


class Usuals:
    """What is usual, by task: for an ask of some tasks, or for all asks of a phase that share it.

    Asks of a phase differ in what is sent, not in what is sent back. A client that is alone in one of them, as with a
    class of FedOVA that is behind the others, is so compared with the clients of the others. Sizes are two lists per
    task, by job.
    """

    def __init__(self) -> None:
        self._by_task: dict[str, Usual] = {}

    def count(self, tasks: Iterable[str] | None = None) -> int:
        """Of how many clients the sizes are known, in all of these tasks; None: in all that are known."""
        known = self._by_task.keys() if tasks is None else tasks
        return min((self._of(task).count for task in known), default=0)

    def note(self, tasks: Sequence[str], sizes: list[list[float]], clients: list[int] | None = None) -> None:
        for task, two in _pairs(tasks, sizes):
            self._of(task).note(two, clients)

    def doubts(self, tasks: Sequence[str], sizes: list[list[float]], ratio: float) -> list[bool]:
        """Which uploads, of those noted last, have a size `beyond` so much in any task."""
        found = [self._of(task).doubts(two, ratio) for task, two in _pairs(tasks, sizes)]
        return [any(job) for job in zip(*found, strict=True)]

    def beyond(
        self, tasks: Sequence[str], job: Sizes, ratio: float, least: float = 0.0
    ) -> tuple[str, float, float] | None:
        """(task, size, what is usual) of the first size of a job that is `beyond` so much."""
        for task, two in _pairs(tasks, job):
            if (found := self._of(task).beyond(two, ratio, least)) is not None:
                return task, *found
        return None

    def large(self, task: str) -> float:
        """What is usual for the large parts of a task."""
        return self._of(task).large

    def _of(self, task: str) -> Usual:
        return self._by_task.setdefault(task, Usual())


def _pairs(tasks: Sequence[str], sizes: Sequence[T]) -> Iterator[tuple[str, list[T]]]:
    """Every task with its two of the sizes."""
    for place, task in enumerate(tasks):
        yield task, list(sizes[2 * place : 2 * place + 2])


def _usual(place: int, ordered: list[float]) -> float:
    median, some = _lower(ordered), ordered[bisect_right(ordered, 0.0) :]
    if some and len(some) < len(ordered):  # beside zeros one number next to 0 could be the median
        median = max(median, min(1.0, some[len(some) // 2]))
    return max(median, 1.0) if place % 2 else median


def _lower(ordered: list[float]) -> float:
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0


def sizes(upload: Payload, losses: tuple[str, ...]) -> list[Tensor | None]:
    """The largest magnitude in every job's upload, [J]: of its large parts, and of its small ones; None: zeros."""
    parted = _parted(upload, losses)
    return [torch.stack([checks.largest(leaf) for leaf in leaves]).amax(0) if leaves else None for leaves in parted]


def magnitude(parts: Sequence[Params]) -> float:
    """The largest magnitude in the large ones of some parts, 0 if there is none, or none that is finite."""
    least = min(SMALL, max(map(tree.size, parts), default=0))
    leaves = [leaf for part in parts if tree.size(part) >= least for leaf in part.values() if leaf.is_floating_point()]
    found = max((float(leaf.abs().max()) for leaf in leaves if leaf.numel()), default=0.0)
    return found if math.isfinite(found) else 0.0


def read(rows: list[Tensor | None], jobs: int, fits: Tensor | None) -> tuple[list[list[float]], bool]:
    """Sizes as lists by job, and a flag beside them, in one transfer."""
    there = [row.double() for row in rows if row is not None]
    there += [] if fits is None else [fits.double().expand(jobs)]
    found = torch.stack(there).tolist() if there else []
    flag = fits is not None and bool(found.pop()[0])
    filled = iter(found)
    return [[0.0] * jobs if row is None else next(filled) for row in rows], flag


def _parted(upload: Payload, losses: tuple[str, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """The leaves of the large parts, and those of the others; losses are in neither."""
    parts = {name: part for name, part in upload.items() if name not in losses}
    numbers = {name: _numbers(part) for name, part in parts.items()}
    least = min(SMALL, max(numbers.values(), default=SMALL))
    large, small = list[Tensor](), list[Tensor]()
    for name, part in parts.items():
        (large if numbers[name] >= max(1, least) else small).extend(part.values())
    return large, small


def _numbers(part: Params) -> int:
    """How many numbers of one client a part has; whole numbers are counters."""
    floats = all(leaf.is_floating_point() for leaf in part.values())
    return sum(leaf.numel() // leaf.shape[0] for leaf in part.values()) if floats else 0


class Losses:
    """The losses of an ask so far, by task and part; they are few numbers per client."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], list[Params]] = {}
        self._whose: dict[tuple[str, str], list[int]] = {}
        self._ends: dict[tuple[str, str, str], tuple[Tensor, Tensor]] = {}  # what every number is limited to, once

    def note(self, task: str, upload: Payload, losses: tuple[str, ...], clients: list[int], ratio: float) -> Tensor:
        """Keep those of some jobs; which of these hold a number that may be beyond the limits, [J]."""
        like = next(iter(next(iter(upload.values())).values()))
        doubtful = torch.zeros(len(like), dtype=torch.bool, device=like.device)
        for name in losses:
            part = upload.get(name, {})
            self._ends = {}
            self._seen.setdefault((task, name), []).append(part)
            self._whose.setdefault((task, name), []).extend(clients)
            for leaf in part.values():
                doubtful |= ~(leaf.reshape(len(leaf), -1).abs() <= ratio).all(1)  # NaN is
        return doubtful

    def limited(self, task: str, upload: Payload, losses: tuple[str, ...], ratio: float) -> Payload:
        """An upload whose losses are within the limits."""
        found = dict(upload)
        for name in losses:
            if name in upload:
                ends = {key: self._between((task, name, key), ratio) for key in upload[name]}
                found[name] = {key: _within(leaf, *ends[key]) for key, leaf in upload[name].items()}
        return found

    def _between(self, place: tuple[str, str, str], ratio: float) -> tuple[Tensor, Tensor]:
        """The limits that all clients' numbers set; they are worked out when all are known, and once."""
        if place not in self._ends:
            task, name, key = place
            everybody = torch.cat([part[key] for part in self._seen[task, name]])
            self._ends[place] = _limits(everybody, self._whose[task, name], ratio)
        return self._ends[place]


def _middle(numbers: Tensor) -> Tensor:
    """The lower median over the first axis."""
    return numbers.sort(0).values[(len(numbers) - 1) // 2]


def _limits(everybody: Tensor, clients: list[int], ratio: float) -> tuple[Tensor, Tensor]:
    """The least and the most that all clients' numbers [C, ...] allow, place by place; what is not finite is bad."""
    most = min(torch.finfo(everybody.dtype).max, torch.finfo(sum_type(everybody)).max / len(everybody) / HEAVY)
    finite = torch.nan_to_num(everybody.double(), nan=torch.inf, neginf=torch.inf)
    owners = torch.tensor(clients, device=finite.device)
    several = len(set(clients)) < len(clients)
    each = torch.stack([_middle(finite[owners == one]) for one in owners.unique()]) if several else finite
    median = _middle(each).abs()
    high = (ratio * median.clamp(min=1.0)).clamp(max=most)
    return -(ratio * median.amin().clamp(min=1.0)).clamp(max=most), high


def _within(leaf: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """[J, ...] between these limits."""
    bad = torch.nan_to_num(leaf.double(), nan=torch.inf, neginf=torch.inf)
    return torch.maximum(torch.minimum(bad, high), low).to(leaf.dtype)
