"""Whether somebody drew from torch's global generator: what a client draws is addressed and comes from elsewhere."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

# get_rng_state holds a lock of torch's while it makes its result. If Python collects garbage right then, another thread
# may run, and one that asks for the state too waits for that lock while holding the GIL: deadlock.
_ONE_AT_A_TIME = threading.Lock()


def drawn() -> Tensor:
    """The state of torch's global generator; it changes with every draw."""
    with _ONE_AT_A_TIME:
        return torch.get_rng_state()


def undo(state: Tensor) -> None:
    """As if nothing had been drawn since."""
    with _ONE_AT_A_TIME:
        torch.set_rng_state(state)
