"""A schedule's draws in C: the same words as `fedge.engine.clients.batches`, two calls instead of fifty.

    order of epoch e:   positions i by ascending (fold(key, ORDER, e, i) >> 24, i)
    address of step s:  fold(key, STEP, s)

Whole numbers alone, so nothing is rounded: whoever draws, the batches are the same.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedge.engine.recording.c_library import NoCompiler, load
from fedge.keys import FOLD_IN_C, ORDER, STEP

log = logging.getLogger("fedge")
Drawn = tuple[Tensor, Tensor, Tensor]
MOST = 256  # examples of a client: of more, numpy sorts faster than places are counted

_ORDERS = f"""{FOLD_IN_C}
void run(int64_t clients, int64_t epochs, const int64_t *sizes, const uint64_t *keys, const int64_t *examples,
         int64_t *drawn) {{
  int64_t words[{MOST}];
  for (int64_t c = 0; c < clients; c++) {{
    int64_t n = sizes[c];
    uint64_t key = fold(keys[c], {ORDER});
    for (int64_t e = 0; e < epochs; e++) {{
      uint64_t mine = fold(key, e);
      for (int64_t i = 0; i < n; i++) words[i] = (int64_t)(fold(mine, i) >> 24) * {MOST} + i;
      for (int64_t i = 0; i < n; i++) {{
        int64_t place = 0;
        for (int64_t k = 0; k < n; k++) place += words[k] < words[i];
        drawn[place] = examples[i];
      }}
      drawn += n;
    }}
    examples += n;
  }}
}}
"""

_STEPS = f"""{FOLD_IN_C}
void run(int64_t first, int64_t last, int64_t jobs, int64_t width, const int64_t *sizes, const int64_t *a_pass,
         const int64_t *base, const uint64_t *keys, const int64_t *last_step, const int64_t *drawn,
         int64_t *index, uint8_t *mask, uint64_t *address) {{
  for (int64_t t = first; t < last; t++)
    for (int64_t j = 0; j < jobs; j++) {{
      int64_t step = t < last_step[j] ? t : last_step[j], epoch = step / a_pass[j], n = sizes[j];
      int64_t from = (step - epoch * a_pass[j]) * width;
      const int64_t *mine = drawn + base[j] + epoch * n;
      for (int64_t b = 0; b < width; b++) {{
        int64_t here = from + b;
        *mask++ = here < n;
        *index++ = mine[here < n ? here : n - 1];
      }}
      *address++ = fold(fold(keys[j], {STEP}), step);
    }}
}}
"""


class Draws:
    """Both programs, on tensors of int64 on the CPU, one number after another."""

    def __init__(self) -> None:
        self._orders, self._steps = _function(_ORDERS, 2, 4), _function(_STEPS, 4, 9)

    def orders(self, examples: Tensor, sizes: Tensor, keys: Tensor, epochs: int) -> Tensor:
        """Every client's examples in the order of each epoch, flat: client by client, epoch by epoch."""
        drawn = examples.new_empty(len(examples) * epochs)
        self._orders(len(sizes), epochs, *_pointers(sizes, keys, examples, drawn))
        return drawn

    def steps(self, first: int, last: int, active: int, width: int, parts: tuple[Tensor, ...]) -> Drawn:
        """Pool indices [T, A, B], mask [T, A, B] and addresses [T, A] of some steps.

        `parts` are sizes, steps per epoch, first places, keys and last steps of the jobs, and what `orders` drew.
        """
        shape = last - first, active
        index = torch.empty(*shape, width, dtype=torch.long)
        mask, address = torch.empty(*shape, width, dtype=torch.bool), torch.empty(shape, dtype=torch.long)
        self._steps(first, last, active, width, *_pointers(*parts, index, mask, address))
        return index, mask, address


def _pointers(*tensors: Tensor) -> list[int]:
    return [one.data_ptr() for one in tensors]


def _function(text: str, numbers: int, pointers: int) -> Callable[..., Any]:
    found: Any = load(text)[0]
    found.argtypes, found.restype = [ctypes.c_int64] * numbers + [ctypes.c_void_p] * pointers, None
    function: Callable[..., Any] = found
    return function


@lru_cache(maxsize=1)
def draws() -> Draws | None:
    """The programs, None without a C compiler: numpy draws the same then."""
    try:
        return Draws()
    except NoCompiler as reason:
        log.info("draws are made with numpy: %s", reason)
        return None
