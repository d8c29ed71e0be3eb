"""The wireless cell of this literature: Shannon's rate over path loss, shadowing and Rayleigh fading.

Model and default numbers: Yang, Chen, Saad, Hong and Shikh-Bahaei, Energy Efficient Federated Learning Over Wireless
Communication Networks, IEEE Transactions on Wireless Communications 20(3), 2021. The band is shared evenly by the
clients of a phase, and fading is drawn anew in every phase.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedge.checks import brief, non_negative, positive
from fedge.core import At
from fedge.edge.devices import LEAST, MOST, Devices, Fleet, check_spread
from fedge.edge.draws import Array, exponential, normal, uniform
from fedge.keys import DEVICE, FADING, fold

PLACE, SHADOW, CLOCK = 3, 4, 5  # what is drawn of a client's device
DOWN, UP = 0, 1
LOUDEST = 300.0  # decibels, either way: ten times that is more than a number can say


def watts(dbm: float) -> float:
    """Decibels over a milliwatt as watts."""
    return float(10 ** (dbm / 10 - 3))


@dataclass(frozen=True)
class Cell(Fleet):
    """Clients anywhere in a disc around one base station.

        g_k = 10^(-(loss_0 + slope log10(d_k / km) + shadow_k) / 10) * h_k,   h_k ~ Exp(1), drawn per phase
        r_k = b log2(1 + g_k p / (N_0 b)),   b = bandwidth / (clients in the phase)
        joules per cycle = kappa f_k^2,      FLOP/s = f_k * (FLOPs per cycle)

    d_k is that of a point drawn evenly in the disc, f_k the device's clock between `slowest` and `fastest`, drawn
    evenly. A radio draws its transmit power while it sends; receiving is not counted, as in the paper. The base station
    answers on a band of its own, shared in the same way.
    """

    bandwidth: float = 20e6  # Hz
    radius: float = 250.0  # metres
    power_dbm: float = 10.0
    station_dbm: float = 40.0
    noise_dbm: float = -174.0  # per Hz
    loss: float = 128.1  # dB at one kilometre
    slope: float = 37.6  # dB per factor of ten in distance
    shadowing: float = 8.0  # dB, standard deviation
    fading: bool = True
    slowest: float = 2e9  # Hz
    fastest: float = 2e9
    flops_per_cycle: float = 4.0
    kappa: float = 1e-28
    memory: float = 4e9
    availability: float = 1.0
    seed: int = 0

    kinds = ("cell",)

    def __post_init__(self) -> None:
        for name in ("bandwidth", "radius", "slowest", "fastest", "flops_per_cycle", "kappa", "memory"):
            positive(name, getattr(self, name))
        for name in ("bandwidth", "slowest", "fastest", "flops_per_cycle"):
            _within(name, getattr(self, name), LEAST, MOST)
        for name in ("power_dbm", "station_dbm", "noise_dbm", "loss", "slope", "shadowing"):
            _within(name, getattr(self, name), -LOUDEST, LOUDEST)
        non_negative("shadowing", self.shadowing)
        check_spread(1.0, 0.0, self.availability)
        if self.fastest < self.slowest:
            raise ValueError(f"fastest is {self.fastest:g}, it must be at least slowest ({self.slowest:g})")

    def devices(self, clients: Array) -> Devices:
        f = self.slowest + (self.fastest - self.slowest) * uniform(fold(self.seed, DEVICE), clients, CLOCK)
        same = np.ones(len(clients))
        down, up = (self.shannon(self.gain(clients), power, 1) for power in (self.station_dbm, self.power_dbm))
        compute, send = self.kappa * f**3, watts(self.power_dbm) * same
        numbers = (f * self.flops_per_cycle, down, up, compute, 0 * same, send, self.memory * same, 0 * same)
        return Devices(*numbers, self.availability * same, np.zeros(len(clients), np.int64))

    def rates(self, at: At, clients: Array, found: Devices, sharing: int | None = None) -> tuple[Array, Array]:
        many = len(clients) if sharing is None else sharing
        gain, key = self.gain(clients), fold(self.seed, FADING, at.seed, at.round, at.phase)
        sides = ((DOWN, self.station_dbm), (UP, self.power_dbm))
        h = [exponential(key, clients, side) if self.fading else 1.0 for side, _ in sides]
        down, up = (self.shannon(gain * h[side], power, many) for side, power in sides)
        return down, up

    def distance(self, clients: Array) -> Array:
        """Metres to the base station, at least one."""
        found: Array = np.maximum(1.0, self.radius * np.sqrt(uniform(fold(self.seed, DEVICE), clients, PLACE)))
        return found

    def gain(self, clients: Array) -> Array:
        """What arrives of the power that was sent, without fading."""
        shadow = self.shadowing * normal(fold(self.seed, DEVICE), clients, SHADOW)
        found: Array = 10 ** (-(self.loss + self.slope * np.log10(self.distance(clients) / 1000) + shadow) / 10)
        return found

    def shannon(self, gain: Array, dbm: float, sharing: int) -> Array:
        """bit/s of each of so many clients that share the band."""
        band = self.bandwidth / max(sharing, 1)
        found: Array = band * np.log2(1 + gain * watts(dbm) / (watts(self.noise_dbm) * band))
        return np.maximum(found, LEAST)  # who hears nothing would be waited for without end


def _within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} is {brief(value)}, it must be from {least:g} to {most:g}")
