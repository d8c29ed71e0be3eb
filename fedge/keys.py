"""Addressed randomness: every draw is a pure function of where it happens.

A key is an int64. `fold` derives a child key from a key and the words of an address (round, client, step, ...)
with the SplitMix64 finaliser, in arithmetic modulo 2^64 that CPU, GPU and plain Python agree on to the bit. There is
no generator to advance, so the order of work, the chunk and the machine change nothing.

    >>> fold(0, 3, 17) == int(fold_tensor(0, 3, torch.tensor(17)))
    True
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[Any]

# What a key is drawn for. The first word of an address, so that no two uses share a stream.
COHORT, CLIENT, SHARE, ORDER, STEP, FINISH, CODEC, SERVER, LIAR = 1, 2, 3, 4, 5, 6, 7, 8, 9
DEVICE, FADING, LEAVING, AVAILABLE, DISPATCH, TIES = 21, 22, 23, 24, 25, 26  # of the edge: devices, channels, arrivals

_BITS = (1 << 64) - 1


def _signed(word: int) -> int:
    word &= _BITS
    return word - (1 << 64) if word >> 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _shift(z: Tensor, n: int) -> Tensor:
    """Logical shift right; torch's own keeps the sign."""
    return (z >> n) & ((1 << (64 - n)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _FIRST
    z = (z ^ _shift(z, 27)) * _SECOND
    return z ^ _shift(z, 31)


def _mix_int(z: int) -> int:
    z &= _BITS
    z = (z ^ (z >> 30)) * _FIRST & _BITS
    z = (z ^ (z >> 27)) * _SECOND & _BITS
    return _signed(z ^ (z >> 31))


def fold(key: int, *words: int) -> int:
    """The child of `key` at the address `words`."""
    for word in words:
        key = _mix_int(key + _GOLDEN * (word + 1))
    return key


def fold_tensor(key: int | Tensor, *words: int | Tensor) -> Tensor:
    """The same for tensors of keys or words, which broadcast."""
    for word in words:
        if isinstance(key, int) and isinstance(word, int):
            key = fold(key, word)
        else:
            step = (word + 1) * _GOLDEN
            key = _mix(torch.as_tensor(key + (_signed(step) if isinstance(step, int) else step)))
    return torch.as_tensor(key)


def fold_array(key: int | Words, *words: int | Words) -> Words:
    """The same for numpy's unsigned words, which cost less than tensors where there are few."""
    found = np.atleast_1d(np.uint64(key & _BITS)) if isinstance(key, int) else key.view(np.uint64)
    for word in words:
        found = _mix_array(found + _step(word))
    return found


def _step(word: int | Words) -> Any:
    if isinstance(word, int):
        return np.uint64((word + 1) * _GOLDEN & _BITS)
    return (word.view(np.uint64) + _ONE) * _GOLDEN_WORD


_ONE, _GOLDEN_WORD = np.uint64(1), np.uint64(_GOLDEN & _BITS)
_MIX = [(np.uint64(shift), np.uint64(word & _BITS)) for shift, word in ((30, _FIRST), (27, _SECOND))]
_LAST = np.uint64(31)


def _mix_array(z: Words) -> Words:
    for shift, word in _MIX:
        z = (z ^ (z >> shift)) * word
    mixed: Words = z ^ (z >> _LAST)
    return mixed


FOLD_IN_C = f"""#include <stdint.h>
static inline uint64_t fold(uint64_t key, uint64_t word) {{
  uint64_t z = key + (word + 1) * {_GOLDEN & _BITS:#x}u;
  z = (z ^ z >> 30) * {_FIRST & _BITS:#x}u;
  z = (z ^ z >> 27) * {_SECOND & _BITS:#x}u;
  return z ^ z >> 31;
}}"""  # `fold` of one word


def choose(key: int, population: int, count: int) -> Tensor:
    """`count` different ids below `population`, ascending, in time that does not grow with the population.

    The first `count` distinct values of the stream fold(key, 0), fold(key, 1), ... modulo the population. When more
    than half are wanted the rejections would pile up, so all ids are sorted by their key instead.
    """
    if 2 * count > population:
        keys = fold_array(key, np.arange(population)).view(np.int64)
        return torch.from_numpy(np.sort(keys.argsort(kind="stable")[:count]))
    drawn = 2 * count
    while True:
        stream = (fold_array(key, np.arange(drawn)).view(np.int64) % population).tolist()
        distinct = list(dict.fromkeys(stream))
        if len(distinct) >= count:
            return torch.tensor(sorted(distinct[:count]))
        drawn *= 2


def keep_mask(key: Tensor, shape: torch.Size, p: float, device: torch.device) -> Tensor:
    """True with probability 1 - p for every element, addressed by the element's flat position.

    Integers are compared, not floats: the mask is the same in every precision and on every device.
    """
    return _shift(_mix(key + _steps(shape, device)), 1) >= int(p * (1 << 63))


DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
Like = TypeVar("Like", Tensor, dict[str, Tensor])


def uniform(key: int | Tensor, like: Like) -> Like:
    """Numbers in [0, 1), one per element of `like` and of its type, addressed by the element's flat position.

    One key is one draw: a dict of tensors gets a key per tensor, derived from this one.
    """
    drawn: Like = _each(_uniform, key, like)
    return drawn


def normal(key: int | Tensor, like: Like) -> Like:
    """Independent standard normal numbers, one per element of `like` (Box and Muller, 1958); dicts as in `uniform`."""
    drawn: Like = _each(_normal, key, like)
    return drawn


def _each(draw: Callable[[int | Tensor, Tensor], Tensor], key: int | Tensor, like: Any) -> Any:
    if isinstance(like, Tensor):
        return draw(key, like)
    return {name: draw(fold_tensor(key, place), leaf) for place, (name, leaf) in enumerate(like.items())}


def _uniform(key: int | Tensor, like: Tensor) -> Tensor:
    bits = _mix(key + _steps(like.shape, like.device))
    digits = DIGITS[like.dtype]  # no more than the type has: a number must not be rounded up to 1
    wide = _shift(bits, 64 - digits).to(torch.float64 if like.dtype == torch.float64 else torch.float32)
    return (wide * 2.0**-digits).to(like.dtype)


def _normal(key: int | Tensor, like: Tensor) -> Tensor:
    wide = like if like.dtype == torch.float64 else like.float()
    first, second = (_uniform(fold_tensor(key, word).to(like.device), wide) for word in (0, 1))
    return ((-2 * torch.log1p(-first)).sqrt() * torch.cos(2 * torch.pi * second)).to(like.dtype)


@lru_cache(maxsize=64)
def _steps(shape: torch.Size, device: torch.device) -> Tensor:
    """What `fold_tensor` adds to a key for every position; kept, because every step of a run asks for the same."""
    return (torch.arange(1, shape.numel() + 1, device=device) * _GOLDEN).view(shape)
