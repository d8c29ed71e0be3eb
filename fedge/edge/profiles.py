"""Named devices and networks. Where each number comes from is said in docs/edge.md; assumed ones are called so there.

They are orders of magnitude. For your own fleet, measure and write a CSV file (`fedge.edge.Table`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["microcontroller", "raspberry_pi", "phone", "laptop"]
NetworkName = Literal["wifi", "lte", "lora"]


@dataclass(frozen=True)
class Network:
    """Rates in bit/s, the watts that a radio draws while it receives and while it sends, and seconds lost per phase."""

    down: float
    up: float
    receive_watts: float
    transmit_watts: float
    latency: float


@dataclass(frozen=True)
class Profile:
    """What a device computes per second (FLOP/s of training), what that draws, its memory, and its usual network."""

    flops: float
    compute_watts: float
    memory: float  # bytes
    network: NetworkName


NETWORKS: dict[str, Network] = {
    "wifi": Network(100e6, 50e6, 0.8, 1.0, 0.01),
    "lte": Network(13e6, 6e6, 1.288 + 0.05197 * 13, 1.288 + 0.43839 * 6, 0.07),
    "lora": Network(5470.0, 5470.0, 3.3 * 10.8e-3, 3.3 * 29e-3, 1.0),
}

PROFILES: dict[str, Profile] = {
    "microcontroller": Profile(43e6, 0.33, 320e3, "lora"),
    "raspberry_pi": Profile(8e9, 6.0, 4e9, "wifi"),
    "phone": Profile(10e9, 3.0, 4e9, "lte"),
    "laptop": Profile(100e9, 28.0, 16e9, "wifi"),
}
