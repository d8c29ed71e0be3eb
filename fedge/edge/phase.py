"""One phase on the devices: how long each client needs for its three parts, and how far it came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedge.edge.draws import Array

SHOWN = 60  # clients in a recorded time line


class End(NamedTuple):
    """How a phase ended: whose answers count, who left, and until when each client worked, [C]; when, and why."""

    good: Array
    left: Array
    until: Array
    seconds: float
    reason: str

    def why(self, client: int) -> str:
        """Why the answer of the client at a position does not count."""
        return f"left after {self.until[client]:.3g} s" if self.left[client] else self.reason


@dataclass(frozen=True)
class Phase:
    """The clients of a phase, [C] each: seconds before anything moves and of its three parts, and the watts of each."""

    clients: Array
    latency: Array
    down: Array
    compute: Array
    up: Array
    watts: tuple[Array, Array, Array]
    active: Array  # whether there is anything to do

    @property
    def seconds(self) -> Array:
        return self.latency + self.down + self.compute + self.up

    def parts(self, until: Array) -> tuple[Array, Array, Array]:
        """Seconds that were spent in each part when a client stops at a time."""
        left = np.maximum(0.0, until - self.latency)
        down = np.minimum(self.down, left)
        compute = np.minimum(self.compute, left - down)
        return down, compute, np.minimum(self.up, left - down - compute)

    def joules(self, until: Array) -> float:
        """What all clients together have drawn."""
        spent = self.parts(until)
        return float(sum((watts * part).sum() for watts, part in zip(self.watts, spent, strict=True)))

    def crossed(self, until: Array) -> tuple[Array, Array]:
        """The shares of what is sent down and up that have arrived."""
        down, _, up = self.parts(until)
        return _share(down, self.down), _share(up, self.up)


def _share(part: Array, whole: Array) -> Array:
    found: Array = np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), 1.0)
    return found


def timeline(task: str, phase: Phase, end: End) -> dict[str, Any]:
    """[client, seconds before, down, at work, up, whether it counted] of the slowest clients."""
    order = [at for at in (-phase.seconds).argsort(kind="stable").tolist() if phase.active[at]][:SHOWN]
    parts = np.stack([np.minimum(phase.latency, end.until), *phase.parts(end.until)], 1).tolist()
    rows = [[int(phase.clients[at]), *parts[at], bool(end.good[at])] for at in sorted(order)]
    return {"task": task, "seconds": end.seconds, "clients": rows}
