"""Local step sizes that shrink: from round to round, lr_t = lr * decay^t, and from step to step within a round.

The round's factor travels with the parameters, one number per client, so that client work stays one task and the
engine's recorded step stays one recording. With decay = 1 nothing is sent and nothing is kept.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedge.core import Payload

PART = "schedule"


def check(decay: float, name: str = "lr_decay") -> None:
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1:
        raise ValueError(f"{name} is {decay!r}, it must be above 0 and at most 1 (1: the step size stays)")


def begin(decay: float) -> dict[str, Any]:
    """What the server's state needs besides."""
    return {} if decay == 1 else {"round": 0}


def after(decay: float, state: dict[str, Any]) -> dict[str, Any]:
    """The same, one round later."""
    return {} if decay == 1 else {"round": state["round"] + 1}


def part(decay: float, state: dict[str, Any]) -> Payload:
    """What is sent besides the parameters."""
    if decay == 1:
        return {}
    like = next(iter(state["params"].values()))
    return {PART: {"factor": like.new_full((), decay ** state["round"])}}


def factor(sent: Payload) -> Tensor | None:
    """The factor that was sent, if any."""
    return sent[PART]["factor"] if PART in sent else None
