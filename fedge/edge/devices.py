"""Devices: what every client computes with, and over what it is reached.

A fleet is asked for the devices of a few clients at a time and draws them by address, so a million clients cost
nothing until they are asked.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedge.checks import choice
from fedge.core import At
from fedge.edge.draws import Array, normal, uniform
from fedge.edge.profiles import NETWORKS, PROFILES, Network, Profile
from fedge.keys import DEVICE, fold

MIDDLE = 2 * 1.6448536269514722  # standard deviations between the 5 % and the 95 % of a normal distribution
LEAST, MOST = 1e-9, 1e30  # of speeds and rates: beyond them seconds and joules are no numbers any more
KIND, SPEED, RATE = 0, 1, 2  # what is drawn of a device


class Devices(NamedTuple):
    """The devices of some clients, [C] each: FLOP/s, bit/s, watts, bytes, seconds, a probability, and the kind's place.

    `latency` is what a phase takes beside transfer and work: waking up, connecting, starting a process.
    """

    flops: Array
    down: Array
    up: Array
    compute_watts: Array
    receive_watts: Array
    transmit_watts: Array
    memory: Array
    latency: Array
    availability: Array
    kind: Array


class Fleet(ABC):
    """The devices of all clients."""

    kinds: tuple[str, ...]
    checksum: int | None = None  # of devices that a file has, not the fields: the file may change before a run goes on

    @abstractmethod
    def devices(self, clients: Array) -> Devices:
        """What does not change from round to round."""

    def rates(self, at: At, clients: Array, found: Devices, sharing: int | None = None) -> tuple[Array, Array]:
        """Down and up, bit/s, when these clients (None), or so many, take part in a phase."""
        return found.down, found.up

    @property
    def shares(self) -> bool:
        """Whether one client's rates may depend on who else takes part."""
        return type(self).rates is not Fleet.rates


EVERYBODY = 100_000  # clients; of more, nothing is kept or worked out for all of them at once


class Drawn:
    """The devices of a fleet's first `clients`, each drawn once; of more than `EVERYBODY`, whenever asked for."""

    def __init__(self, fleet: Fleet, clients: int) -> None:
        self.fleet, self._few = fleet, clients <= EVERYBODY
        self._rows: Array = np.empty((clients if self._few else 0, len(Devices._fields)))
        self._there: Array = np.zeros(len(self._rows), bool)

    def __call__(self, clients: Array) -> Devices:
        if not self._few:
            return self.fleet.devices(clients)
        new = clients[~self._there[clients]]
        if len(new):
            self._rows[new] = np.stack(self.fleet.devices(new), axis=1)
            self._there[new] = True
        columns = self._rows[clients].T
        return Devices._make([*columns[:-1], columns[-1].astype(np.int64)])


@dataclass(frozen=True)
class Profiles(Fleet):
    """Devices of one named kind, or of several with equal shares, around which single devices spread.

        log(FLOP/s of client k) = log(the profile's) + sigma z_k,   sigma = ln(spread) / 3.29
        log(bit/s of client k)  = log(the network's) + sigma (rho z_k + sqrt(1 - rho^2) z'_k)

    The middle 90 % of all devices of a kind lie within a factor of `spread`; `correlation` is rho: do fast devices
    have fast networks? A faster device draws the same power, so it needs less energy.
    """

    profile: str | Sequence[str] = "phone"
    network: str | None = None  # None: the usual one of each profile
    spread: float = 1.0
    correlation: float = 0.0
    availability: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.kinds:
            choice("profile", name, PROFILES)
        if self.network is not None:
            choice("network", self.network, NETWORKS)
        check_spread(self.spread, self.correlation, self.availability)

    @property
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.profile,) if isinstance(self.profile, str) else tuple(self.profile)

    def devices(self, clients: Array) -> Devices:
        key = fold(self.seed, DEVICE)
        own = [PROFILES[name] for name in self.kinds]
        kind = (uniform(key, clients, KIND) * len(own)).astype(np.int64)
        speed, rate = self._factors(key, clients)
        device, radio = _columns(own)[:, kind], _columns([self._network(one) for one in own])[:, kind]
        flops, compute, memory = device
        down, up, receive, transmit, latency = radio
        there = np.full(len(clients), self.availability)
        return Devices(flops * speed, down * rate, up * rate, compute, receive, transmit, memory, latency, there, kind)

    def _factors(self, key: int, clients: Array) -> tuple[Array, Array]:
        if self.spread == 1:
            ones = np.ones(len(clients))
            return ones, ones
        sigma, rho = math.log(self.spread) / MIDDLE, self.correlation
        first, second = normal(key, clients, SPEED), normal(key, clients, RATE)
        speed: Array = np.exp(sigma * first)
        rate: Array = np.exp(sigma * (rho * first + math.sqrt(1 - rho * rho) * second))
        return speed, rate

    def _network(self, profile: Profile) -> Network:
        return NETWORKS[profile.network if self.network is None else self.network]


def _columns(rows: Sequence[Profile | Network]) -> Array:
    """Numbers of profiles or networks, one row per field."""
    return np.array([[value for value in vars(row).values() if not isinstance(value, str)] for row in rows]).T


def check_spread(spread: float, correlation: float, availability: float) -> None:
    if not 1 <= spread <= MOST:
        limits = f"at least 1 (1: all devices of a kind are alike) and at most {MOST:g}"
        raise ValueError(f"spread is {spread}, it must be {limits}")
    if not -1 <= correlation <= 1:
        raise ValueError(f"correlation is {correlation}, it must be between -1 and 1")
    if not 0 < availability <= 1:
        raise ValueError(f"availability is {availability}, it must be above 0 and at most 1 (1: always)")
