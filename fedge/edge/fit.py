"""From the times that a real fleet logged to the devices that reproduce them.

Every record of a fleet's run says how long each phase took and, by client, how long its process took to start, how long
it worked, and the bytes of its messages. What each client had to do is counted in a simulation of the same experiment.

    FLOP/s of client k   = sum of its FLOPs / sum of its seconds at work
    rest of a phase      = its seconds - max_k (start_k + work_k),  fitted by  a + b * (largest message, down and up)
    latency of client k  = a + mean start_k;   rate = 8 / b bit/s, or without limit where messages are all of one size
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedge.core import Ask, At, Examples, Share
from fedge.edge.devices import MOST, Devices
from fedge.edge.draws import Array
from fedge.edge.table import SLOWEST
from fedge.edge.work import Workload
from fedge.engine.links.base_link import Around, BaseLink, Replies
from fedge.federation import Federation

FAST = 1e12  # bit/s: so fast that a message takes no time
VARIES = 0.2  # of the mean: sizes that vary less say nothing about a rate
SHORTEST = 1e-6  # seconds: no work of a client takes less
LARGEST = 1e12  # seconds or bytes: no phase and no message has more

Jobs = dict[tuple[int, int], dict[int, float]]  # (round, phase) -> client -> FLOPs


class Counting(Around):
    """Writes down the FLOPs of every client in every phase."""

    def __init__(self, inner: BaseLink, federation: Federation) -> None:
        super().__init__(inner)
        self.load, self.flops = Workload(inner.algorithm, federation), Jobs()

    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Replies:
        ids = clients.numpy()
        self.load.open(at, asks)
        total = np.sum([self.load.of(ask, ids).flops for ask in asks], axis=0)
        self.flops[(at.round, at.phase)] = dict(zip(ids.tolist(), total.tolist(), strict=True))
        return self.inner.ask(at, asks, clients)

    def share(self, at: At, wanted: Share) -> Examples:
        self.load.share(wanted)
        return self.inner.share(at, wanted)


class Seen(NamedTuple):
    """One client in one phase: process start and work in seconds, the bytes of its messages both ways, and up alone."""

    client: int
    start: float
    work: float
    moved: float
    up: float


@dataclass(frozen=True)
class Logged:
    """One phase of a fleet."""

    at: tuple[int, int]
    seconds: float
    clients: tuple[Seen, ...]

    @property
    def busy(self) -> float:
        return max(one.start + one.work for one in self.clients)

    @property
    def moved(self) -> float:
        return max(one.moved for one in self.clients)


class Fitted(NamedTuple):
    """Devices by client, and how well they tell rounds: seconds that were measured, and predicted.

    `predicted` is by the devices, which were fitted to all rounds; `ahead` is by devices that were fitted to all but
    that round, None where one of its clients was in no other.
    """

    devices: Devices
    clients: list[int]
    measured: list[float]
    predicted: list[float]
    ahead: list[float | None]

    @property
    def error(self) -> float:
        """The median over rounds of |predicted / measured - 1|."""
        return float(np.median(np.abs(np.array(self.predicted) / np.array(self.measured) - 1)))

    @property
    def error_ahead(self) -> float | None:
        """The same of rounds that the devices were not fitted to; None if there is no such round."""
        pairs = [(a, b) for a, b in zip(self.ahead, self.measured, strict=True) if a is not None]
        return float(np.median([abs(a / b - 1) for a, b in pairs])) if pairs else None


def read(records: Iterable[Mapping[str, Any]], last: int | None = None) -> list[Logged]:
    """The phases that a run's records have; one in which a node was lost took as long as that took to be seen.

    Seconds are what nodes say: one that says what cannot be is left out of the phase, and a phase that is none as well.
    So is one of another round than its record's, or after `last`: all rounds before it would be simulated.
    """
    found = []
    for record in records:
        phases = record.get("phases")
        for phase in phases if isinstance(phases, list) else []:
            try:
                at, seconds = (int(phase["round"]), int(phase["phase"])), float(phase["seconds"])
                told = [_seen(seconds, *entry) for entry in phase["clients"]]
            except (TypeError, ValueError, KeyError, OverflowError):
                continue
            if not _is_of(at[0], record, last):
                continue
            seen = tuple(one for one in told if one.work > 0)
            if seen and seconds <= LARGEST and not any(one.work <= 0 and one.up <= 0 for one in told):
                found.append(Logged(at, seconds, seen))
    return found


def _is_of(round: int, record: Mapping[str, Any], last: int | None) -> bool:
    """Whether a record may have a phase of this round; set-up, round 0, is in the first record."""
    return round in (0, record.get("round")) and (last is None or round <= last)


def _seen(seconds: float, client: int, start: float, work: float, down: float, up: float) -> Seen:
    """One client's entry; no work if what it says of it is not within the phase."""
    numbers = [float(one) for one in (start, work, down, up)]
    fits = all(0 <= one <= LARGEST for one in numbers) and SHORTEST <= numbers[1] <= seconds
    return Seen(int(client), min(numbers[0], seconds), numbers[1] if fits else 0.0, numbers[2] + numbers[3], numbers[3])


def fit(phases: list[Logged], flops: Jobs) -> Fitted:
    """The devices of the clients that were seen; a phase counts if the simulation asked the same clients in it."""
    known = [one for one in phases if one.at in flops and {s.client for s in one.clients} <= flops[one.at].keys()]
    if not known:
        raise ValueError(
            "no phase with times of nodes: the run must come from a real fleet (fedge deploy) of this version of fedge"
        )
    devices, clients = _devices(known, flops)
    return Fitted(devices, clients, *_rounds(known, flops, devices, clients), _ahead(known, flops))


def _devices(known: list[Logged], flops: Jobs) -> tuple[Devices, list[int]]:
    """The devices of all clients that were seen in these phases, and which clients these are."""
    clients = sorted({seen.client for phase in known for seen in phase.clients})
    place = {client: at for at, client in enumerate(clients)}
    done, work, start, count = np.zeros((4, len(clients)))
    for phase in known:
        for seen in phase.clients:
            at = place[seen.client]
            done[at] += flops[phase.at][seen.client]
            work[at] += seen.work
            start[at] += seen.start
            count[at] += 1
    rate = np.clip(done / work, SLOWEST, MOST)
    begin, per_byte = _rest(known)
    latency = begin + (start + np.maximum(0.0, work - done / rate)) / count  # with what no device computes so slowly
    bits = np.full(len(clients), 8 / per_byte if per_byte > 0 else FAST)
    zeros = np.zeros(len(clients))
    memory, sure = np.full(len(clients), np.inf), np.ones(len(clients))
    devices = Devices(rate, bits, bits, zeros, zeros, zeros, memory, latency, sure, zeros.astype(np.int64))
    return devices, clients


def _ahead(known: list[Logged], flops: Jobs) -> list[float | None]:
    """Every round, predicted from all others."""
    found: list[float | None] = []
    for round in dict.fromkeys(phase.at[0] for phase in known):
        own, others = ([one for one in known if (one.at[0] == round) is mine] for mine in (True, False))
        seen = {one.client for phase in others for one in phase.clients}
        if any(one.client not in seen for phase in own for one in phase.clients):
            found.append(None)
            continue
        devices, clients = _devices(others, flops)
        found += _rounds(own, flops, devices, clients)[1]
    return found


def _rest(phases: list[Logged]) -> tuple[float, float]:
    """Seconds of a phase that are neither start nor work: so many at least, and so many per byte."""
    rest = np.array([max(0.0, phase.seconds - phase.busy) for phase in phases])
    moved = np.array([phase.moved for phase in phases])
    if len(phases) < 3 or moved.std() < VARIES * moved.mean():
        return float(rest.mean()), 0.0
    slope = float(((moved - moved.mean()) * (rest - rest.mean())).sum() / ((moved - moved.mean()) ** 2).sum())
    slope = max(0.0, slope)
    begin = float((rest - slope * moved).mean())
    return (begin, slope) if begin >= 0 else (0.0, float((rest * moved).sum() / (moved * moved).sum()))


def _rounds(phases: list[Logged], flops: Jobs, devices: Devices, clients: list[int]) -> tuple[list[float], list[float]]:
    """Measured and predicted seconds, by round."""
    place = {client: at for at, client in enumerate(clients)}
    measured: dict[int, float] = {}
    predicted: dict[int, float] = {}
    for phase in phases:
        taken: Array = np.array(
            [_seconds(seen, flops[phase.at][seen.client], devices, place) for seen in phase.clients]
        )
        measured[phase.at[0]] = measured.get(phase.at[0], 0.0) + phase.seconds
        predicted[phase.at[0]] = predicted.get(phase.at[0], 0.0) + float(taken.max())
    return list(measured.values()), list(predicted.values())


def _seconds(seen: Seen, flops: float, devices: Devices, place: Mapping[int, int]) -> float:
    at = place[seen.client]
    return float(devices.latency[at] + flops / devices.flops[at] + 8 * seen.moved / devices.down[at])
