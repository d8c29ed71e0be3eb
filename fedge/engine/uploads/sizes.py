"""How large uploads are, what is usual in a cohort, and which numbers are far beyond it.

The size of an upload is its largest magnitude: of its large parts, those with at least 64 numbers (or the largest one
there is), and apart from them of the small ones beside these, such as counters. What is usual is the lower median over
the clients of an ask, so that one of two cannot raise it; of a client with several rows (FedOVA) over its rows first,
so that who claims many has no more say. If some are 0 it is at least the upper median of the others, or 1 if that is
less: these may be the liars alone, and one of them next to 0. For small parts it is at least 1, for large ones at least
a hundredth of the largest number in what clients were sent (`Intake`).

Losses at candidates (`Task.losses`) are no measure of a client: a candidate may overflow at one client alone. A number
that is far beyond the median of its place, or not finite, counts for so much that the candidate is not chosen:

    l_j  ->  ratio * max(1, median_j)  at most,  -ratio * max(1, min_i |median_i|)  at least
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

import torch
from torch import Tensor

from fedge import tree
from fedge.core import Params, Payload
from fedge.engine.uploads import checks
from fedge.engine.uploads.coding import SMALL
from fedge.engine.uploads.streaming import sum_type

HEAVY = 1e7  # no weight is as large: sums of limited losses do not overflow
Sizes = tuple[float, ...]  # two per task, of its large and its small parts


class Usual:
    """The sizes of the uploads of an ask so far."""

    def __init__(self) -> None:
        self._known: list[list[float]] = []  # two per task: one size per client, ascending
        self._rows: list[dict[int, list[float]]] = []  # two per task: the sizes of every client, ascending

    @property
    def count(self) -> int:
        return len(self._known[0]) if self._known else 0

    def note(self, sizes: list[list[float]], clients: list[int] | None = None) -> None:
        """More uploads: two lists per task, by job; and whose they are, if clients have several."""
        self._known = self._known or [[] for _ in sizes]
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

    def beyond(self, job: Sizes, ratio: float, least: float = 0.0) -> tuple[int, float, float] | None:
        """(task, size, what is usual) of the first size of an upload that is over `ratio` times the usual one.

        Of large parts `least` is usual at least.
        """
        for place, (size, known) in enumerate(zip(job, self._known, strict=True)):
            usual = _usual(place, known)
            usual = max(usual, least) if usual and place % 2 == 0 else usual
            if math.isfinite(size) and usual and size > ratio * usual:
                return place // 2, size, usual
        return None


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

    def note(self, task: str, upload: Payload, losses: tuple[str, ...], clients: list[int], ratio: float) -> Tensor:
        """Keep those of some jobs; which of these hold a number that may be beyond the limits, [J]."""
        like = next(iter(next(iter(upload.values())).values()))
        doubtful = torch.zeros(len(like), dtype=torch.bool, device=like.device)
        for name in losses:
            part = upload.get(name, {})
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
                seen = self._seen[task, name]
                found[name] = {
                    key: _within(leaf, torch.cat([part[key] for part in seen]), self._whose[task, name], ratio)
                    for key, leaf in upload[name].items()
                }
        return found


def _middle(numbers: Tensor) -> Tensor:
    """The lower median over the first axis."""
    return numbers.sort(0).values[(len(numbers) - 1) // 2]


def _within(leaf: Tensor, everybody: Tensor, clients: list[int], ratio: float) -> Tensor:
    """[J, ...] between the limits that all clients' numbers [C, ...] set, place by place; what is not finite is bad."""
    most = min(torch.finfo(leaf.dtype).max, torch.finfo(sum_type(leaf)).max / len(everybody) / HEAVY)
    finite = torch.nan_to_num(everybody.double(), nan=torch.inf, neginf=torch.inf)
    owners = torch.tensor(clients, device=finite.device)
    median = _middle(torch.stack([_middle(finite[owners == one]) for one in owners.unique()])).abs()
    high = (ratio * median.clamp(min=1.0)).clamp(max=most)
    low = -(ratio * median.amin().clamp(min=1.0)).clamp(max=most)
    bad = torch.nan_to_num(leaf.double(), nan=torch.inf, neginf=torch.inf)
    return torch.maximum(torch.minimum(bad, high), low).to(leaf.dtype)
