"""C programs over the jobs of a stack, in as many threads as torch has."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Some = Callable[[ctypes.c_int64, ctypes.c_int64], int]  # jobs first to last - 1; not 0 if there is no memory


@lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Of this process: in a forked one the threads of the first are gone."""
    return ThreadPoolExecutor(threads)


def each(jobs: int, some: Some, what: str) -> None:
    """All jobs; `what` they are is said if memory runs out."""
    threads = min(torch.get_num_threads(), jobs)

    def part(at: int) -> int:
        return some(*(ctypes.c_int64(jobs * edge // threads) for edge in (at, at + 1)))

    if any(map(part, range(1)) if threads == 1 else _pool(threads, os.getpid()).map(part, range(threads))):
        raise MemoryError(f"no memory for the steps of {what}: lower chunk= or the batch size")


def integers(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def pointers(tensors: Sequence[Tensor | None], offsets: Sequence[int] = ()) -> Any:
    """Where tensors begin, null for None; with an offset so many bytes behind."""
    added = [*offsets, *[0] * (len(tensors) - len(offsets))]
    places = [None if one is None else one.data_ptr() + by for one, by in zip(tensors, added, strict=True)]
    return (ctypes.c_void_p * len(places))(*places)
