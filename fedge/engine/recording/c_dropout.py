"""Dropout masks of J clients in C: `fedge.keys.keep_mask` for every client's key, in one pass over the numbers.

    D_i = [mix(key' + golden (i + 1)) >> 1 >= p 2^63] / (1 - p),    key' = fold(key, call)

Whole numbers are compared, so the masks are the same to the bit; in torch's operations they are a dozen passes.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedge.engine.recording.c_jobs import each, integers, pointers
from fedge.engine.recording.c_library import is_made, load
from fedge.handle import addressed_dropout
from fedge.handle.stacked.operator import operator
from fedge.handle.stacked.rule import stacked
from fedge.keys import FOLD_IN_C

_SOURCE = (
    FOLD_IN_C
    + """
/* Jobs first to last - 1; `n` are the call's number and the numbers of each job. */
int run(int64_t first, int64_t last, const int64_t *n, double p, void **places) {
  const uint64_t *keys = places[0];
  int64_t least = (int64_t)(p * 9223372036854775808.0);
  float whole = 1.f / (float)(1 - p);
  for (int64_t j = first; j < last; j++) {
    uint64_t key = fold(keys[j], n[0]);
    float *out = (float *)places[1] + j * n[1];
    for (int64_t i = 0; i < n[1]; i++) out[i] = (int64_t)(fold(key, i) >> 1) >= least ? whole : 0;
  }
  return 0;
}
"""
)


@lru_cache(maxsize=1)
def program() -> Any:
    """Raises NoCompiler where it cannot be made."""
    return load(_SOURCE)[0]


def _like(keys: Tensor, numbers: list[float]) -> list[Tensor]:
    return [keys.new_empty(len(keys), *map(int, numbers[2:]), dtype=torch.float32)]


def _draw(keys: Tensor, numbers: list[float]) -> list[Tensor]:
    """Keys [J]; the share that is dropped, the call's number and the shape of a client's mask."""
    keys, found = keys.contiguous(), _like(keys, numbers)
    run, places, p = program(), pointers([keys, *found]), ctypes.c_double(numbers[0])
    given = integers([int(numbers[1]), found[0][0].numel()])
    each(len(keys), lambda first, last: run(first, last, given, p, places), "dropout")
    return found


draw = operator("dropout_mask_in_c", _draw, 1, like=_like, numbers="float[]")


def scaled_mask(key: Tensor, call: int, shape: torch.Size, p: float, like: Tensor) -> Tensor:
    """As `fedge.handle.addressed_dropout.scaled_mask`."""

    def plain(keys: Tensor) -> Tensor:
        return addressed_dropout.scaled_mask(keys, call, shape, p, like)

    def many(keys: Tensor) -> Tensor:
        if like.dtype != torch.float32 or not is_made(program, "dropout masks"):
            return plain(keys.view(-1, *[1] * len(shape)))
        found: Tensor = draw(keys, [p, call, *shape])[0]
        return found

    found: Tensor = stacked(plain, many, key)
    return found
