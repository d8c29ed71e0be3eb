"""A virtual clock as a link around a link: the training is real, the time and the energy are computed.

    t_k = l_k + 8 down_k / r_down + flops_k / c_k + 8 up_k / r_up     seconds of client k in a phase; l_k: latency
    e_k = p_receive 8 down_k / r_down + p_compute flops_k / c_k + p_transmit 8 up_k / r_up
    T   = max t_k over the clients that are waited for;  a round is the sum over its phases

The server's own work takes no time. Without a policy nothing of the training changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedge.algorithms.asynchronous import Asynchronous, Late
from fedge.checks import positive
from fedge.core import Ask, At, Drop, Examples, Progress, Share
from fedge.edge.cohorts import Choice, by_choice
from fedge.edge.devices import EVERYBODY, Devices, Drawn, Fleet
from fedge.edge.draws import Array, exponential, lots, uniform
from fedge.edge.events import Events
from fedge.edge.fairness import by_kind
from fedge.edge.phase import End, Phase, timeline
from fedge.edge.policies import Policy, WaitForAll
from fedge.edge.work import Work, Workload
from fedge.engine.links.base_link import Around, BaseLink, Replies
from fedge.engine.simulator import Simulator
from fedge.engine.uploads.checks import TooFewReplies
from fedge.federation import Federation
from fedge.keys import AVAILABLE, LEAVING, fold
from fedge.ledger import Row, payload_bytes


@dataclass
class Spent:
    """What a round has cost so far."""

    round: int = -1
    seconds: float = 0.0
    joules: float = 0.0
    late: list[int] = field(default_factory=list)
    short: int = 0  # devices that have less memory than their work needs
    phases: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)  # of asynchronous rounds


class Clock(Around):
    """Times every phase on the devices of a fleet, and lets a policy say who is waited for.

    `stay` is the mean of the exponential time after which a client leaves in the middle of a phase (None: nobody
    does). `choice` says how cohorts are chosen (None: evenly). The record of every round gets `virtual_seconds`,
    `joules` and `late`; rounds 1, 10, 100 and so on get a `timeline`.
    """

    def __init__(
        self,
        inner: BaseLink,
        federation: Federation,
        fleet: Fleet,
        policy: Policy | None = None,
        *,
        stay: float | None = None,
        choice: Choice | None = None,
    ) -> None:
        super().__init__(inner)
        positive("stay", stay, optional=True)
        if inner.algorithm.privacy() is not None:
            check_apart(fleet, chosen(policy, choice), stay)
        self.federation, self.fleet, self.policy = federation, fleet, policy or WaitForAll()
        self.stay, self.choice, self.devices = stay, choice, Drawn(fleet, federation.clients)
        self.load = Workload(inner.algorithm, federation)
        self.spent = Spent()
        self.events: Events | None = None
        self._looked = self._resumed = False  # whether somebody can keep the policy's budget; whether a run goes on

    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Replies:
        self._turn(at)
        ids, task = clients.numpy(), asks[0].tasks[0]
        devices = self.devices(ids)
        there = self._available(at, ids, devices)
        asleep = [Drop(client, task, "not available in this round") for client in ids[~there].tolist()]
        ids, devices = ids[there], Devices(*(column[there] for column in devices))
        self.load.open(at, asks)
        works = [self.load.of(ask, ids) for ask in asks]
        phase = self._phase(at, ids, devices, works)
        self._check_budget(at, asks, works, phase)
        asks, phase = self._shortened(asks, works, phase)
        end = self._end(at, phase)
        self._note(asks, devices, works, phase, end)
        before = len(self.ledger)
        lost = [
            Drop(int(phase.clients[k]), task, end.why(k)) for k in np.flatnonzero(phase.active & ~end.good).tolist()
        ]
        try:
            replies, dropped = self._carry(at, asks, phase, end)
        except TooFewReplies as few:  # the round is skipped, and what it cost is counted
            self._book_lost(before, works, phase, end)
            away = f" ({len(lost)} late or gone, {len(asleep)} not available)"
            raise TooFewReplies(f"{few}{away}", [*few.dropped, *lost, *asleep]) from few
        self._book_lost(before, works, phase, end)
        return replies, [*dropped, *lost, *asleep]

    def _turn(self, at: At) -> None:
        """A new round begins; what was set up before the first belongs to the first."""
        if at.round != self.spent.round:
            goes_on = at.round == 1 and self.spent.round == 0
            self.spent = replace(self.spent, round=1) if goes_on else Spent(at.round)

    def _available(self, at: At, ids: Array, devices: Devices) -> Array:
        if (devices.availability >= 1).all():
            return np.ones(len(ids), bool)
        found: Array = uniform(fold(at.seed, AVAILABLE, at.round), ids) < devices.availability
        return found

    def _phase(self, at: At, ids: Array, devices: Devices, works: list[Work]) -> Phase:
        rate_down, rate_up = self.fleet.rates(at, ids, devices)
        jobs, flops, down, up = (np.sum([work[column] for work in works], axis=0) for column in range(4))
        seconds = (devices.latency, 8 * down / rate_down, flops / devices.flops, 8 * up / rate_up)
        watts = (devices.receive_watts, devices.compute_watts, devices.transmit_watts)
        return Phase(ids, *seconds, watts, jobs > 0)

    def _check_budget(self, at: At, asks: tuple[Ask, ...], works: list[Work], phase: Phase) -> None:
        """Refuse a budget that nobody of the first cohort can keep, not even with one step of every task.

        A run that is resumed was looked at when it began.
        """
        if self._looked or (self._resumed and at.round > 1) or not phase.active.any():
            return
        self._looked = True
        budget = self.policy.budget(phase.seconds, phase.compute)
        if budget is None:
            return
        total, none = sum(work.flops for work in works), np.zeros(len(phase.clients))
        pairs = zip(asks, works, strict=True)
        least = sum(self.load.fitting(ask, phase.clients, work.steps, none)[1] for ask, work in pairs)  # one step
        step = phase.compute * least / np.where(total > 0, total, 1.0)
        if (step > budget * (1 + 1e-9))[phase.active].all():
            fastest = (phase.seconds - phase.compute + step)[phase.active].min()
            raise TooFewReplies(
                f"nobody can keep the time of '{asks[0].tasks[0]}': of {int(phase.active.sum())} clients the fastest "
                f"needs {fastest:.3g} s for one step, latency and transfers, with {self.policy}: allow more time"
            )

    def _shortened(self, asks: tuple[Ask, ...], works: list[Work], phase: Phase) -> tuple[tuple[Ask, ...], Phase]:
        """The asks with the steps that fit the policy's budget, and the phase that follows."""
        budget = self.policy.budget(phase.seconds, phase.compute)
        if budget is None:
            return asks, phase
        some = np.where(phase.compute > 0, phase.compute, 1.0)
        share = np.where(phase.compute > 0, np.clip(budget / some, 0.0, 1.0), 1.0)
        found, flops = list[Ask](), np.zeros(len(share))
        for ask, work in zip(asks, works, strict=True):
            steps, spent = self.load.fitting(ask, phase.clients, work.steps, share)
            limits = dict(zip(phase.clients.tolist(), map(tuple, steps.T.tolist()), strict=True))
            found.append(replace(ask, limits=limits))
            flops += spent
        total = sum(work.flops for work in works)
        return tuple(found), replace(phase, compute=phase.compute * flops / np.where(total > 0, total, 1.0))

    def _end(self, at: At, phase: Phase) -> End:
        """Whose answers count, and until when each client works; one without anything to do is no matter."""
        left = np.full(len(phase.clients), np.inf)
        if self.stay is not None:
            left = self.stay * exponential(fold(at.seed, LEAVING, at.round, at.phase), phase.clients)
        active, good = phase.active, ~phase.active
        cut = self.policy.cut(phase.seconds[active], left[active], lambda: lots(at, phase.clients[active]))
        good[active] = cut.good
        until = np.where(active, np.minimum(np.minimum(phase.seconds, left), cut.seconds), 0.0)
        return End(good, ~good & (left <= until), until, cut.seconds, cut.reason)

    def _carry(self, at: At, asks: tuple[Ask, ...], phase: Phase, end: End) -> Replies:
        active = phase.active
        if not len(active) or (active.any() and not (end.good & active).any()):
            for ask in asks:
                sent = payload_bytes(ask.send) if len(active) else 0
                self.ledger.add(Row(at.round, at.phase, "+".join(ask.tasks), 0, 0, sent, 0))
            raise TooFewReplies(f"nobody answered '{asks[0].tasks[0]}': {self._why_nobody(phase)}")
        return self.inner.ask(at, asks, torch.from_numpy(phase.clients[end.good]))

    def _why_nobody(self, phase: Phase) -> str:
        if not len(phase.clients):
            return "no client of the cohort was available: take a larger cohort or raise availability"
        return (
            f"of {int(phase.active.sum())} clients the fastest needs {phase.seconds[phase.active].min():.3g} s, with "
            f"{self.policy} and stay = {self.stay}: allow more time"
        )

    def _note(self, asks: tuple[Ask, ...], devices: Devices, works: list[Work], phase: Phase, end: End) -> None:
        spent = self.spent
        spent.seconds += end.seconds
        spent.joules += phase.joules(end.until)
        spent.late += phase.clients[~end.good & ~end.left].tolist()
        short = [int((work.memory > devices.memory)[work.jobs > 0].sum()) for work in works]
        spent.short = max(spent.short, *short)
        if _is_shown(spent.round):
            spent.phases.append(timeline("+".join(asks[0].tasks), phase, end))

    def _book_lost(self, before: int, works: list[Work], phase: Phase, end: End) -> None:
        """What crossed to and from clients whose answers do not count belongs into the ledger as well."""
        if end.good.all():
            return
        down, up = phase.crossed(end.until)
        for at, work in enumerate(works[: len(self.ledger) - before], before):
            lost, row = ~end.good & (work.jobs > 0), self.ledger.rows[at]
            more_down, more_up = (
                int(np.floor(share * size)[lost].sum()) for share, size in ((down, work.down), (up, work.up))
            )
            clients = row.clients + int(lost.sum())
            self.ledger.rows[at] = replace(row, clients=clients, down=row.down + more_down, up=row.up + more_up)

    def notes(self) -> dict[str, Any]:
        spent, self.spent = self.spent, Spent(self.spent.round)  # a round that asks nobody costs nothing
        found: dict[str, Any] = {"virtual_seconds": spent.seconds, "joules": spent.joules, **spent.more}
        found |= {"short_of_memory": spent.short} if spent.short else {}
        if self.algorithm.privacy() is None:  # else who took part is nobody's business
            found |= {"late": sorted(set(spent.late)), **({"timeline": spent.phases} if spent.phases else {})}
        return {**self.inner.notes(), **found}

    def share(self, at: At, wanted: Share) -> Examples:
        """Every client receives the shared examples, all at the same time."""
        self._turn(at)
        size = self.load.share(wanted)
        examples = self.inner.share(at, wanted)
        many, slowest = self.federation.clients, 0.0
        for first in range(0, many, EVERYBODY):
            ids = np.arange(first, min(many, first + EVERYBODY))
            devices = self.fleet.devices(ids)
            seconds = 8 * size / self.fleet.rates(at, ids, devices, many)[0]
            slowest = max(slowest, float(seconds.max()))
            self.spent.joules += float((devices.receive_watts * seconds).sum())
        self.spent.seconds += slowest
        return examples

    def advance(self, state: Any, seed: int, round: int, size: int) -> tuple[Any, Progress] | None:
        late = Late.of(self.algorithm)
        if late is None:
            return self.inner.advance(state, seed, round, size)
        if self.events is None:
            self.events = self._events(late.algorithm)
        self.spent = Spent(round)
        found, progress, row, spending = self.events.advance(late.inner(state), seed, round, size)
        self.ledger.add(row)
        self.spent.seconds, self.spent.joules = spending.seconds, spending.joules
        self.spent.more = {"server_steps": spending.steps, "staleness": spending.staleness}
        self.events.require(spending.good, progress.dropped)  # else the round is skipped, and what it cost is counted
        return late.after(state, found), progress

    def _events(self, algorithm: Asynchronous) -> Events:
        link = self.inner
        if isinstance(link, Around):
            raise ValueError(
                f"the clock is around {type(link).__name__}, which asynchronous training would pass by: it computes "
                "clients event by event, and asks no link; put the clock around a Simulator"
            )
        if not isinstance(link, Simulator):
            raise ValueError(f"the link is a {type(link).__name__}: asynchronous training is simulated in one process")
        if given := chosen(self.policy, self.choice):
            raise ValueError(f"asynchronous training waits for nobody, but {given}: leave it out")
        return Events(algorithm, link, self.load, self.fleet, self.federation.clients, self.stay)

    def choosing(self, clients: int, size: int) -> Callable[[At], Tensor] | None:
        if self.choice is None:
            return self.inner.choosing(clients, size)
        return by_choice(self.choice, self.federation, self.devices, self.load, size)

    def about(self) -> dict[str, Any]:
        found = by_kind(self.federation, self.fleet) if self.federation.clients <= EVERYBODY else {}
        return {**self.inner.about(), **({"devices": found} if found else {})}

    def settings(self) -> dict[str, Any]:
        devices = {} if self.fleet.checksum is None else {"devices": self.fleet.checksum}
        return {**self.inner.settings(), "edge": self._described(), **devices}

    def restore(self, settings: Mapping[str, Any]) -> None:
        self._resumed = True
        before = settings.get("edge")
        if before is not None and before != self._described():
            was, now = _differing(str(before), self._described())
            raise ValueError(f"the run was timed with {was}, now it is {now}: restore that")
        if settings.get("devices") not in (None, self.fleet.checksum):  # checkpoints of earlier versions have none
            raise ValueError(f"the devices in the file of {self.fleet} have changed since the run began: restore it")
        self.inner.restore({key: value for key, value in settings.items() if key not in ("edge", "devices")})

    def _described(self) -> str:
        return f"{self.fleet}, {self.policy}, stay={self.stay}, choice={self.choice}"


def _differing(one: str, other: str) -> tuple[str, str]:
    """Two descriptions from the first word on that differs, and no further than need be."""
    words = one.split(", "), other.split(", ")
    first = next((at for at, pair in enumerate(zip(*words, strict=False)) if pair[0] != pair[1]), 0)
    return ", ".join(words[0][first : first + 2]), ", ".join(words[1][first : first + 2])


def chosen(policy: Policy | None, choice: Choice | str | None, called: str = "choice") -> str:
    """Which of the two were set, and to what; empty: neither, so everybody who was drawn evenly is waited for."""
    words = [] if type(policy or WaitForAll()) is WaitForAll else [f"policy is {policy}"]
    return " and ".join([*words, *([] if choice is None else [f"{called} is {choice!r}"])])


def check_apart(fleet: Fleet, given: str, stay: float | None) -> None:
    """Refuse what lets one client decide whether another one's answer counts; `given` is `chosen` of a clock."""
    counts_on = "Private counts on clients being drawn one by one and on nobody's answer depending on another client"
    if given:
        raise ValueError(f"{counts_on}, but {given}: leave it out")
    if stay is not None and fleet.shares:
        raise ValueError(
            f"{counts_on}: in a {type(fleet).__name__} they share a band, and with stay = {stay:g} the more they are, "
            "the more of them leave before they answer; leave out stay, or take other devices"
        )


def _is_shown(round: int) -> bool:
    """Rounds 1, 10, 100, ..., and what goes before them."""
    return round == 0 or str(round).strip("0") == "1"
