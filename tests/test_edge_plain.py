"""Whole runs under every policy against a plain loop over events, one client at a time, in float64.

Times, energy, who is late and what is learned: everything is computed again from the devices and the examples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

import fedge
from fedge.core import At
from fedge.edge import Cell, Choice, Clock, Deadline, FirstOf, PartialWork, Profiles, WaitForAll
from fedge.edge.draws import exponential, normal, uniform
from fedge.edge.wireless import DOWN, PLACE, SHADOW, UP
from fedge.engine import Simulator
from fedge.engine.clients.batches import client_key, one_client
from fedge.handle import Handle, parameters
from fedge.keys import AVAILABLE, COHORT, DEVICE, FADING, LEAVING, TIES, choose, fold
from tests.cases import close, ragged, toy_data, toy_model
from tests.test_edge import plain_rarest

SEED, ROUNDS, COHORT_SIZE, SIZE, FLOPS = 3, 5, 4, 424, 210  # 53 parameters of 8 bytes; FLOPs of 6-5-3 per example
FLEET = Profiles(("phone", "raspberry_pi"), spread=30.0, correlation=0.5, seed=4)
SLOW = Profiles(("microcontroller", "phone"), "wifi", spread=10.0, seed=4)  # computing is most of the time
CELL = Cell(bandwidth=1e6, radius=900.0, slowest=1e6, fastest=1e7, seed=2)  # on the air for most of the time
LOCAL = {"lr": 0.2, "epochs": 3, "batch_size": 4}


class Case(NamedTuple):
    """A policy and what goes with it."""

    policy: Any = WaitForAll()
    stay: float = math.inf
    choice: Choice | None = None
    fleet: Profiles | Cell = FLEET
    algorithm: Any = fedge.FedAvg


PARTIAL = {"policy": PartialWork(0.0103), "fleet": SLOW}
CASES = {
    "wait for all": Case(),
    "deadline": Case(Deadline(0.0705)),
    "first of": Case(FirstOf(3)),
    "partial work": Case(**PARTIAL),
    "partial work, FedProx": Case(**PARTIAL, algorithm=fedge.FedProx),
    "partial work, FedNova": Case(**PARTIAL, algorithm=fedge.FedNova),
    "leaving": Case(stay=0.3),
    "leaving, deadline": Case(Deadline(0.0705), stay=0.3),
    "leaving, first of": Case(FirstOf(2), stay=0.3),
    "by speed": Case(choice=Choice("speed", 3)),
    "by labels": Case(choice=Choice("labels", 3)),
    "not available": Case(fleet=Profiles("phone", spread=30.0, availability=0.6)),
    "cell": Case(fleet=CELL),
    "cell, first of": Case(FirstOf(3), fleet=CELL),
    "cell, deadline": Case(Deadline(0.006), fleet=CELL),
    "cell, not available": Case(fleet=replace(CELL, availability=0.6)),
    "everybody asleep": Case(fleet=Profiles("phone", spread=30.0, availability=0.3)),
    "everybody gone": Case(stay=0.005),
    "everybody late": Case(Deadline(0.0702), fleet=Profiles("phone", spread=30.0)),
}


class Trip(NamedTuple):
    """When a client stops, who it is, whether it answers, its steps, and seconds and watts of its parts."""

    until: float
    client: int
    answers: bool
    steps: int
    parts: list[float]
    watts: list[float]


class Plain:
    """Rounds of FedAvg, FedProx or FedNova: who answers when, and what the server makes of those whom it waits for."""

    def __init__(self, case: Case, algorithm: Any) -> None:
        self.case, self.algorithm, self.where = case, algorithm, ragged(toy_data())
        self.devices, self.params = case.fleet.devices(np.arange(7)), parameters(algorithm.model)
        self.up = SIZE + 4 + (8 if isinstance(algorithm, fedge.FedNova) else 0)  # its number of steps travels too

    def round(self, r: int) -> dict[str, Any]:
        cohort = self.cohort(r)
        trips = sorted(self.trip(r, k, len(cohort)) for k in cohort)
        good, end = list[Trip](), 0.0
        for trip in trips:  # events, one after another
            if isinstance(self.case.policy, Deadline) and trip.until > self.case.policy.seconds:
                end = self.case.policy.seconds
                break
            end = trip.until
            good += [trip] if trip.answers else []
            if isinstance(self.case.policy, FirstOf) and len(good) == self.case.policy.count:
                break
        late = sorted(t.client for t in trips if t not in good and (t.answers or t.until > end))
        if good:  # else the round is skipped, and counts all the same
            self.learn(r, good)
        down, up = (sum(crossed(trip, end, part, size) for trip in trips) for part, size in ((1, SIZE), (3, self.up)))
        spent = {"joules": sum(joules(trip, end) for trip in trips), "down_bytes": down, "up_bytes": up}
        return {"virtual_seconds": end, "late": late, "skipped": not good, **spent}

    def cohort(self, r: int) -> list[int]:
        key, d, choice = fold(SEED, COHORT, r, 0), self.devices, self.case.choice
        many = COHORT_SIZE if choice is None else min(7, choice.among * COHORT_SIZE)
        found = choose(key, 7, many).tolist()
        lot = uniform(fold(SEED, TIES, r, 0), np.arange(7))
        found.sort(key=lambda k: lot[k])  # of equals the first
        if choice is not None and choice.by == "speed":
            bits, work = 8 * SIZE, [3 * self.n(k) * FLOPS / d.flops[k] for k in range(7)]
            cost = [d.latency[k] + bits / d.down[k] + work[k] + bits / d.up[k] for k in range(7)]
            found = sorted(found, key=lambda k: cost[k])[:COHORT_SIZE]
        if choice is not None and choice.by == "labels":
            held = [set(self.where.data.train_y[self.where.examples(k)].tolist()) for k in range(7)]
            found = plain_rarest(held, found, COHORT_SIZE)
        there = uniform(fold(SEED, AVAILABLE, r), np.arange(7)) < d.availability
        return [k for k in sorted(found) if there[k]]

    def trip(self, r: int, k: int, many: int) -> Trip:
        """Of one of so many clients that are asked together."""
        d, epoch = self.devices, -(-self.n(k) // 4)
        before, full = float(d.latency[k]), 3 * epoch
        rates = d.down[k], d.up[k]
        if isinstance(self.case.fleet, Cell):
            rates = on_air(self.case.fleet, r, k, many)
        down, up = float(8 * SIZE / rates[0]), float(8 * self.up / rates[1])
        work = [FLOPS * (s // epoch * self.n(k) + min(s % epoch * 4, self.n(k))) / d.flops[k] for s in range(full + 1)]
        steps = full
        if isinstance(self.case.policy, PartialWork):
            room = self.case.policy.seconds - before - down - up
            steps = max(1, sum(spent <= room for spent in work[1:]))
        taken = before + down + float(work[steps]) + up
        out = math.inf
        if self.case.stay < math.inf:
            out = self.case.stay * float(exponential(fold(SEED, LEAVING, r, 0), np.array([k]))[0])
        watts = [float(column[k]) for column in (d.receive_watts, d.compute_watts, d.transmit_watts)]
        return Trip(min(taken, out), k, taken <= out, steps, [before, down, float(work[steps]), up], watts)

    def n(self, k: int) -> int:
        return len(self.where.examples(k))

    def learn(self, r: int, good: list[Trip]) -> None:
        """FedProx: weights are examples; FedNova: every update over its steps, times the mean number of steps."""
        total, nova = sum(self.n(t.client) for t in good), isinstance(self.algorithm, fedge.FedNova)
        reach = sum(self.n(t.client) * t.steps for t in good) / total if nova else 1.0
        moves = [(reach * self.n(t.client) / total / (t.steps if nova else 1), self.local(r, t)) for t in good]
        start = self.params
        self.params = {
            name: leaf + sum(share * (end[name] - leaf) for share, end in moves) for name, leaf in start.items()
        }

    def local(self, r: int, trip: Trip) -> dict[str, Any]:
        model, params = Handle(self.algorithm.model, self.algorithm.loss), self.params
        mu = getattr(self.algorithm, "mu", 0.0)
        for _, batch in zip(range(trip.steps), self.batches(r, trip.client), strict=False):
            grad = model.grad(params, batch)
            params = {n: w - 0.2 * (grad[n] + mu * (w - self.params[n])) for n, w in params.items()}
        return params

    def batches(self, r: int, k: int) -> Iterator[Any]:
        own, data = self.where.examples(k), self.where.data
        task = fedge.Task(None, None, None, LOCAL["epochs"], LOCAL["batch_size"])
        return iter(one_client(task, data.train_x[own], data.train_y[own], client_key(At(SEED, r, 0), k)))


def on_air(cell: Cell, r: int, k: int, many: int) -> tuple[float, float]:
    """bit/s down and up in round r: Shannon's rate on 1/many of the band, with path loss, shadowing and fading."""
    who = np.array([k])
    metres = max(1.0, cell.radius * math.sqrt(uniform(fold(cell.seed, DEVICE), who, PLACE)[0]))
    loss = 128.1 + 37.6 * math.log10(metres / 1000) + 8.0 * normal(fold(cell.seed, DEVICE), who, SHADOW)[0]
    band, found = cell.bandwidth / many, list[float]()
    for side, dbm in ((DOWN, 40.0), (UP, 10.0)):
        power = exponential(fold(cell.seed, FADING, SEED, r, 0), who, side)[0]  # |h|^2 of Rayleigh's h: of mean 1
        signal = dbm - loss + 10 * math.log10(power)  # dBm, as the noise: -174 per Hz
        noise = -174.0 + 10 * math.log10(band)
        found.append(band * math.log2(1 + 10 ** ((signal - noise) / 10)))
    return found[0], found[1]


def joules(trip: Trip, end: float) -> float:
    left = max(0.0, min(trip.until, end) - trip.parts[0])
    spent = 0.0
    for part, watts in zip(trip.parts[1:], trip.watts, strict=True):
        spent, left = spent + watts * min(part, left), left - min(part, left)
    return spent


def crossed(trip: Trip, end: float, part: int, size: int) -> int:
    """Bytes that have arrived in a part of a trip, when the phase ends: whole ones."""
    whole, left = trip.parts[part], min(trip.until, end) - sum(trip.parts[:part])
    return size if left >= whole * (1 - 1e-9) else math.floor(size * max(0.0, left) / whole)


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_that_of_a_plain_loop_over_events(name: str) -> None:
    case = CASES[name]
    more = {"mu": 0.5} if case.algorithm is fedge.FedProx else {}
    algorithm, where = case.algorithm(toy_model(), **LOCAL, **more), ragged(toy_data())
    stay = None if case.stay == math.inf else case.stay
    link = Clock(Simulator(algorithm, where), where, case.fleet, case.policy, stay=stay, choice=case.choice)
    found = fedge.train(algorithm, where, rounds=ROUNDS, cohort=COHORT_SIZE, seed=SEED, link=link)
    plain = Plain(case, algorithm)
    for r, record in enumerate(found.history, 1):
        told = plain.round(r)
        assert record["late"] == told["late"]
        assert record["virtual_seconds"] == pytest.approx(told["virtual_seconds"], rel=1e-9)
        assert record["joules"] == pytest.approx(told["joules"], rel=1e-9)
        assert (record["down_bytes"], record["up_bytes"]) == (told["down_bytes"], told["up_bytes"])
        assert ("skipped" in record) == told["skipped"]
    assert any("skipped" in record for record in found.history) == name.startswith("everybody")
    assert close(found.params, plain.params) < 1e-11


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("wait for all", "cell")])
def test_every_policy_changes_what_is_learned(name: str) -> None:
    """Else the comparison above would say nothing about it."""
    case = CASES[name]
    algorithm = case.algorithm(toy_model(), **LOCAL)
    one, other = (Plain(some, algorithm) for some in (case, Case(fleet=case.fleet)))
    other.devices = other.devices._replace(availability=np.ones(7))
    for r in range(1, ROUNDS + 1):
        one.round(r)
        other.round(r)
    assert close(one.params, other.params) > 1e-6
