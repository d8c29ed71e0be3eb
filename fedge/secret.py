"""Randomness that nobody can compute who does not know the server's secret.

The numbers of `fedge.keys` are addressed and fast, and clients of a fleet know the seed that they come from. What
protects people is drawn from SHAKE-256 instead: a stream of bits for every (secret, address), so that a run that goes
on draws what it would have drawn.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedge import regular

BITS = 53  # of a double's fraction
LEAST, MOST = 16, 1 << 16  # bytes of a secret


def read(path: str | None) -> bytes:
    """The secret in a file; none at all is for simulations."""
    if path is None:
        return b""
    try:
        found = regular.content(Path(path), MOST)
    except OSError as error:
        name = path if isinstance(error, FileNotFoundError) else "noise.key"  # nothing that there is is written over
        why = str(error.strerror).removesuffix(": remove it")  # it may be /dev/zero
        raise ValueError(
            f"secret is {path!r}, which cannot be read ({why}): make one with `openssl rand -out {name} 32`"
        ) from None
    if len(found) < LEAST:
        raise ValueError(f"secret is {path!r}, which has {len(found)} bytes: {LEAST} or more are needed")
    return found


def gaussian(secret: bytes, address: str, like: Tensor) -> Tensor:
    """Standard normal numbers in float64 of a tensor's shape, on its device (Box and Muller, 1958)."""
    count = like.numel()
    pairs = -(-count // 2)
    drawn = np.frombuffer(_stream(secret, address, 16 * pairs), dtype="<u8").reshape(2, pairs) >> np.uint64(64 - BITS)
    first, second = (drawn + 0.5) * 2.0**-BITS  # above 0: the logarithm is finite
    radius, angle = np.sqrt(-2 * np.log(first)), 2 * math.pi * second
    pair = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(pair[:count]).view(like.shape).to(like.device)


def chosen(secret: bytes, address: str, population: int, rate: float) -> Tensor:
    """Every id below `population` with probability `rate`, independently of the others, ascending."""
    drawn = np.frombuffer(_stream(secret, address, 8 * population), dtype="<u8")
    return torch.from_numpy(np.flatnonzero((drawn >> np.uint64(64 - BITS)) * 2.0**-BITS < rate))


def _stream(secret: bytes, address: str, count: int) -> bytes:
    """The length of the secret goes first: no secret and address run into each other."""
    return hashlib.shake_256(len(secret).to_bytes(8, "big") + secret + address.encode()).digest(count)
