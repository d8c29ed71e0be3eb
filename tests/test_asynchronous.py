"""Asynchronous training against a plain loop over events, one client at a time, in float64."""

from __future__ import annotations

import math
import os
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedge
from fedge.attacks import Attack, attacked
from fedge.core import At
from fedge.edge import Cell, Choice, Clock, Deadline, Profiles, Table
from fedge.edge.draws import exponential, uniform
from fedge.edge.jobs import Stack
from fedge.edge.judge import noted
from fedge.edge.shelf import Shelf
from fedge.edge.trips import Trip
from fedge.engine import Loopback, Simulator, TooFewReplies
from fedge.engine.clients.batches import client_key, one_client
from fedge.experiment import ExperimentError, compare, parse
from fedge.handle import Handle, parameters
from fedge.keys import AVAILABLE, DISPATCH, LEAVING, choose, fold
from tests import warm
from tests.cases import close, ragged, toy_data, toy_model
from tests.reference.spectral import turned
from tests.test_edge import TOML

FLEET = Profiles(("phone", "raspberry_pi"), spread=30.0, seed=4)
SEED = 3


def fedavg(outputs: int = 3, **options: Any) -> fedge.FedAvg:
    return fedge.FedAvg(toy_model(outputs=outputs), **({"lr": 0.2, "epochs": 2, "batch_size": 4} | options))


def fedprox(**options: Any) -> fedge.FedProx:
    return fedge.FedProx(toy_model(), lr=0.2, epochs=2, batch_size=4, mu=0.8, **options)


SPECTRAL = {"server_optimiser": "spectral", "server_momentum": 0.5, "server_lr": 0.7}
ALGORITHMS = {
    "fedbuff": lambda: fedge.FedBuff(fedavg(), buffer=3),
    "fedbuff_weighted": lambda: fedge.FedBuff(fedavg(), buffer=2, weighted=True, staleness=1.0),
    "fedbuff_fresh": lambda: fedge.FedBuff(fedavg(), buffer=2, staleness=0.0),
    "fedasync": lambda: fedge.FedAsync(fedavg(), alpha=0.7),
    "fedbuff_fedova": lambda: fedge.FedBuff(fedge.FedOVA(fedavg(2), classes=3), buffer=2),
    "fedbuff_momentum": lambda: fedge.FedBuff(fedavg(server_momentum=0.5, server_lr=0.5), buffer=2),
    "fedbuff_fedprox": lambda: fedge.FedBuff(fedprox(), buffer=3),
    "fedasync_fedprox": lambda: fedge.FedAsync(fedprox(), alpha=0.7),
    "fedbuff_spectral": lambda: fedge.FedBuff(fedavg(**SPECTRAL), buffer=2),
    "fedbuff_spectral_fedova": lambda: fedge.FedBuff(fedge.FedOVA(fedavg(2, **SPECTRAL), classes=3), buffer=2),
    "one_by_one": lambda: fedge.FedBuff(fedge.FedOVA(fedavg(2, server_lr=0.25), classes=3), buffer=1, staleness=0.0),
    "fedasync_fedova": lambda: fedge.FedAsync(fedge.FedOVA(fedavg(2), classes=3), alpha=0.5, staleness=1.0),
}
ONE_AT_A_TIME = ("fedbuff_momentum", "fedbuff_spectral", "fedbuff_spectral_fedova")  # steps that do not add up


def run(algorithm: Any, rounds: int = 4, cohort: int = 3, fleet: Any = FLEET, **options: Any) -> fedge.Run:
    where = options.pop("where", None) or ragged(toy_data())
    clock = {name: options.pop(name) for name in ("stay", "policy", "choice") if name in options}
    link = Clock(Simulator(algorithm, where, **options.pop("engine", {})), where, fleet, **clock)
    return fedge.train(algorithm, where, rounds=rounds, cohort=cohort, seed=SEED, link=link, **options)


class Plain:
    """Twenty lines of events: who answers when, what it trained, and what the server makes of it."""

    def __init__(self, algorithm: Any, size: int, stay: float = math.inf, fleet: Any = FLEET) -> None:
        self.algorithm, self.size, self.stay, self.where = algorithm, size, stay, ragged(toy_data())
        self.base, self.ova = algorithm.base, algorithm.rows is not None
        self.model = Handle(self.base.model, self.base.loss)
        labels = [sorted(set(self.where.data.train_y[self.where.examples(k)].tolist())) for k in range(7)]
        self.rows = labels if self.ova else [[0]] * 7
        self.devices = fleet.devices(np.arange(7))
        self.rates = fleet.rates(At(SEED, 0, 0), np.arange(7), self.devices, size)  # of so many at work
        self.models = [parameters(self.base.model) for _ in range(algorithm.rows or 1)]
        self.versions, self.buffers = [0] * len(self.models), [[] for _ in self.models]
        self.speed = [{name: torch.zeros_like(leaf) for name, leaf in model.items()} for model in self.models]
        self.now, self.number, self.flights = 0.0, 0, list[Any]()
        self.left, self.old, self.joules, self.down, self.up = list[int](), list[int](), 0.0, 0, 0
        there = self.there()
        for client in choose(fold(SEED, DISPATCH), 7, size).tolist():
            if there[client]:
                self.send(client)
        self.fill(there)

    def send(self, client: int) -> None:
        stays = (
            self.stay * exponential(fold(SEED, LEAVING), np.array([self.number]))[0]
            if self.stay < math.inf
            else math.inf
        )
        took = [(row, self.versions[row], self.models[row]) for row in self.rows[client]]
        until = min(self.seconds(client), stays)
        self.flights.append((self.now + until, self.number, client, stays >= self.seconds(client), took, until))
        self.number += 1
        self.down += self.moved(client, until)[1]

    def there(self) -> Any:
        """Who is available at this moment: one draw for every client."""
        return uniform(fold(SEED, AVAILABLE, self.number), np.arange(7)) < self.devices.availability

    def fill(self, there: Any) -> None:
        while len(self.flights) < self.size:
            busy, key = (
                {flight[2] for flight in self.flights},
                fold(fold(SEED, DISPATCH), self.number) & ((1 << 62) - 1),
            )
            idle = [k for k in range(7) if k not in busy and there[k]]
            if idle:
                while 2 * self.size <= 7 and key % 7 not in idle:
                    key = fold(key, 0) & ((1 << 62) - 1)
                self.send(key % 7 if 2 * self.size <= 7 else idle[key % len(idle)])
                continue
            self.number += 1
            if self.flights:
                break
            there = self.there()

    def seconds(self, k: int) -> float:
        return sum(self.parts(k)[0])

    def moved(self, k: int, until: float) -> tuple[float, int, int]:
        """Joules, and whole bytes down and up, of a client that stops at a time."""
        (left, *rest), shares, spent, d = self.parts(k)[0], list[float](), 0.0, self.devices
        left = max(0.0, until - left)
        for part, watts in zip(rest, (d.receive_watts[k], d.compute_watts[k], d.transmit_watts[k]), strict=True):
            spent, share = spent + watts * min(part, left), min(1.0, left / part + 1e-9)
            shares, left = [*shares, share], max(0.0, left - part)
        down, up = self.parts(k)[1]
        return spent, math.floor(shares[0] * down), math.floor(shares[2] * up)

    def parts(self, k: int) -> tuple[list[float], tuple[int, int]]:
        jobs, n, size = len(self.rows[k]), len(self.where.examples(k)), sum(p.numel() for p in self.models[0].values())
        flops = 180 if self.ova else 210  # per example: 6-5-2 or 6-5-3, forwards and backwards
        d, down, up = self.devices, jobs * 8 * size, jobs * (8 * size + 4)
        work = jobs * self.base.epochs * n * flops / d.flops[k]
        return [d.latency[k], 8 * down / self.rates[0][k], work, 8 * up / self.rates[1][k]], (down, up)

    def event(self) -> None:
        self.flights.sort(key=lambda flight: flight[:2])
        self.now, number, client, answers, took, until = self.flights.pop(0)
        joules, _, up = self.moved(client, until)
        self.joules, self.up = self.joules + joules, self.up + up
        for row, version, start in took if answers else []:
            end = self.local(start, client, number, row)
            self.buffers[row].append((start, end, version, len(self.where.examples(client))))
            if len(self.buffers[row]) == self.algorithm.buffer:
                self.move(row)
        self.left += [] if answers else [client]
        self.fill(self.there())

    def local(self, start: dict, client: int, number: int, row: int) -> dict:
        chosen = self.where.examples(client)
        x, y = self.where.data.train_x[chosen], self.where.data.train_y[chosen]
        task = fedge.Task(None, None, None, self.base.epochs, self.base.batch_size)
        params, mu = start, getattr(self.base, "mu", 0.0)
        for batch in one_client(
            task, x, (y == row).long() if self.ova else y, client_key(At(SEED, number + 1, 0), client)
        ):
            grad = self.model.grad(params, batch)
            params = {
                name: leaf - self.base.lr * (grad[name] + mu * (leaf - start[name])) for name, leaf in params.items()
            }
        return params

    def move(self, row: int) -> None:
        now, arrived = self.models[row], self.buffers[row]
        old = [self.versions[row] - version for _, _, version, _ in arrived]
        self.old += old
        s = [(1 + tau) ** -self.algorithm.staleness for tau in old]
        if isinstance(self.algorithm, fedge.FedAsync):
            moves = [(self.algorithm.alpha * s[0], now, arrived[0][1])]  # (1 - a) w + a w_k
        else:
            weights = [n if self.algorithm.weighted else 1 for *_, n in arrived]
            moves = [
                (w * tau / sum(weights), start, end)
                for w, tau, (start, end, *_) in zip(weights, s, arrived, strict=True)
            ]
        for name, leaf in now.items():
            step = sum(share * (end[name] - start[name]) for share, start, end in moves)
            self.speed[row][name] = self.base.server_momentum * self.speed[row][name] + step
            self.models[row] = {
                **self.models[row],
                name: leaf + self.base.server_lr * self.along(self.speed[row][name]),
            }
        self.versions[row], self.buffers[row] = self.versions[row] + 1, []

    def along(self, speed: torch.Tensor) -> torch.Tensor:
        """Where the server moves: with a spectral step every matrix has equal singular values, at its own length."""
        if self.base.server_optimiser != "spectral":
            return speed
        even = turned(speed) if speed.ndim == 2 else speed
        return (1 - self.base.server_momentum) * even * (speed.norm() / even.norm().clamp(min=1e-300))


SLEEPY, LORA = replace(FLEET, availability=0.5), Profiles("phone", "lora", spread=30.0, seed=4)
EVENTS = [(3, None, FLEET), (5, None, FLEET), (7, None, FLEET), (3, 0.15, FLEET), (3, None, Cell())]
EVENTS += [(3, 5.0, LORA), (3, 10.0, LORA)]  # some leave while they receive or send
EVENTS += [(3, None, SLEEPY), (7, None, SLEEPY), (5, 0.1, SLEEPY), (3, None, replace(FLEET, availability=0.02))]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("cohort", "stay", "fleet"), EVENTS)
def test_events_are_those_of_a_plain_loop(name: str, cohort: int, stay: float | None, fleet: Any) -> None:
    algorithm = ALGORITHMS[name]()
    found = run(algorithm, cohort=cohort, stay=stay, fleet=fleet)
    plain = Plain(algorithm, cohort, stay or math.inf, fleet)
    for record in found.history:
        begin, left, old, plain.joules, plain.up = plain.now, len(plain.left), len(plain.old), 0.0, 0
        for _ in range(cohort):
            plain.event()
        assert record["joules"] == pytest.approx(plain.joules, rel=1e-9)
        assert (record["down_bytes"], record["up_bytes"]) == (plain.down, plain.up)
        assert record["staleness"] == pytest.approx(np.mean(plain.old[old:] or [0]))
        plain.down = 0
        assert record["virtual_seconds"] == pytest.approx(plain.now - begin, rel=1e-9)
        assert [drop["client"] for drop in record["dropped"]] == plain.left[left:]
    assert stay is None or plain.left
    for row, params in enumerate(plain.models):
        own = {n: leaf[row] for n, leaf in found.params.items()} if plain.ova else found.params
        assert close(own, params) < 1e-11
    assert sum(plain.versions) == sum(record["server_steps"] for record in found.history) > 2
    assert found.state["events"]["versions"] == plain.versions


@pytest.mark.parametrize("cohort", [3, 7])
def test_availability_slows_asynchronous_training_down(cohort: int) -> None:
    """Free places stay free: the same number of answers takes longer, the more so the rarer clients are there."""
    seconds = [
        sum(record["virtual_seconds"] for record in run(ALGORITHMS["fedbuff"](), cohort=cohort, fleet=fleet).history)
        for fleet in (FLEET, SLEEPY, replace(FLEET, availability=0.01))
    ]
    assert seconds[0] < seconds[1] < seconds[2]


@pytest.mark.parametrize("cohort", [3, 7])
def test_clients_that_are_never_available_end_the_run_with_a_word(cohort: int, tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("flops,down,up,availability\n" + "1e9,1e6,1e6,0\n" * 7)
    with pytest.raises(TooFewReplies, match="none of 7 clients was available in 1000 looks: raise availability"):
        run(ALGORITHMS["fedbuff"](), cohort=cohort, fleet=Table(str(tmp_path / "d.csv"), 7))


def test_the_mean_of_late_rounds_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    """m_t = m_{t-1} + (w_t - m_{t-1}) / min(t, window) over the models at the ends of rounds; training is untouched."""
    build = ALGORITHMS["fedbuff_fedova"]
    alone, plain = run(build(), rounds=5), Plain(build(), 3)
    means = [dict(model) for model in plain.models]
    for t in range(1, 6):
        for _ in range(3):
            plain.event()
        for mean, now in zip(means, plain.models, strict=True):
            mean.update({name: leaf + (now[name] - leaf) / min(t, 2) for name, leaf in mean.items()})
    observe = fedge.Observe(checkpoint_every=1)
    found = run(fedge.Averaged(build(), window=2), rounds=5)
    for row, mean in enumerate(means):
        assert close({n: leaf[row] for n, leaf in found.params.items()}, mean) < 1e-11
    assert close(found.params, alone.params) > 1e-6
    assert [r["virtual_seconds"] for r in found.history] == [r["virtual_seconds"] for r in alone.history]
    run(fedge.Averaged(build(), window=2), rounds=3, out=tmp_path / "a", observe=observe)
    again = run(fedge.Averaged(build(), window=2), rounds=5, out=tmp_path / "a", observe=observe, resume=True)
    assert close(found.params, again.params) == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_how_it_is_computed_does_not_matter(name: str) -> None:
    whole = run(ALGORITHMS[name](), cohort=5)
    for chunk in (1, 2):
        assert close(whole.params, run(ALGORITHMS[name](), cohort=5, engine={"chunk": chunk}).params) < 1e-11


@pytest.mark.parametrize("fleet", [FLEET, SLEEPY])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_resume_ends_with_the_same_bits(name: str, fleet: Any, tmp_path: Path) -> None:
    observe = fedge.Observe(checkpoint_every=1)
    sleepy = {"stay": 0.3, "fleet": fleet}
    whole = run(ALGORITHMS[name](), rounds=6, **sleepy)
    run(ALGORITHMS[name](), rounds=3, out=tmp_path / "a", observe=observe, **sleepy)
    again = run(ALGORITHMS[name](), rounds=6, out=tmp_path / "a", observe=observe, resume=True, **sleepy)
    assert close(whole.params, again.params) == 0
    assert whole.ledger.rows == again.ledger.rows
    plain = [[{k: v for k, v in r.items() if k != "seconds"} for r in one.history] for one in (whole, again)]
    assert plain[0] == plain[1]
    half = run(ALGORITHMS[name](), rounds=3, **sleepy)
    assert close(whole.params, run(ALGORITHMS[name](), rounds=3, start=half, **sleepy).params) == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_how_many_steps_are_taken_at_a_time_does_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(ALGORITHMS[name](), cohort=7, rounds=6)
    monkeypatch.setattr("fedge.edge.events.STEPS", 2)
    assert close(whole.params, run(ALGORITHMS[name](), cohort=7, rounds=6).params) < 1e-11
    monkeypatch.setattr("fedge.edge.steps.SMALL", 1)  # no product for several rows
    assert close(whole.params, run(ALGORITHMS[name](), cohort=7, rounds=6).params) < 1e-11
    monkeypatch.setattr("fedge.edge.events.AT_ONCE", 1)  # byte: every row by itself
    assert close(whole.params, run(ALGORITHMS[name](), cohort=7, rounds=6).params) < 1e-11
    assert ALGORITHMS[name]().adds_up == (name not in ONE_AT_A_TIME)


def test_a_shelf_gives_what_was_put_there_until_it_is_let_go() -> None:
    """Against a dict of single entries."""
    rng, shelf, plain = np.random.default_rng(0), Shelf(), dict[int, float]()
    for _ in range(200):
        if rng.random() < 0.5 or not plain:
            values = torch.from_numpy(rng.random(int(rng.integers(1, 5))))
            first = shelf.put({"a": {"w": values[:, None], "v": values}}, len(values))
            plain |= {first + at: value for at, value in enumerate(values.tolist())}
        places = rng.permutation(list(plain))[: int(rng.integers(1, 6))]
        shelf = Shelf.read(shelf.plain())
        found = shelf.take(places)["a"]
        assert found["w"][:, 0].tolist() == found["v"].tolist() == [plain[place] for place in places.tolist()]
        shelf.let_go(places)
        for place in places.tolist():
            del plain[place]
        assert sum(shelf.used.values()) == len(plain)
        assert all(set(range(first, first + 4)) & plain.keys() for first in shelf.stacks)


def test_a_state_in_an_earlier_form_is_refused() -> None:
    half = run(ALGORITHMS["fedbuff"](), rounds=1)
    half.state["events"] = {"now": 1.0, "flights": [], "batches": {}}
    with pytest.raises(ValueError, match="written by an earlier version of fedge"):
        run(ALGORITHMS["fedbuff"](), rounds=1, start=half)


@pytest.mark.parametrize("name", ["fedbuff", "fedasync_fedova"])
def test_a_stack_of_few_heights_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the last job is repeated until the height is one of a few."""
    whole, heights, init, many = run(ALGORITHMS[name](), cohort=7, rounds=6), set[int](), Stack.__init__, Stack._many

    def coarse(self: Stack, *words: Any) -> None:
        init(self, *words)
        self.coarse = True

    def seen(self: Stack, task: Any, jobs: Any, payload: Any) -> Any:
        heights.add(len(jobs.keys))
        return many(self, task, jobs, payload)

    monkeypatch.setattr(Stack, "__init__", coarse)
    monkeypatch.setattr(Stack, "_many", seen)
    assert close(whole.params, run(ALGORITHMS[name](), cohort=7, rounds=6).params) < 1e-11
    first = max(heights)
    assert all(height % max(1, first // 8) == 0 for height in heights)


def test_joules_of_those_who_leave() -> None:
    trip = Trip((1.0, 2.0, 3.0, 4.0), (0.5, 2.0, 1.0))
    until = [trip.joules_until(seconds) for seconds in (0.5, 2.0, 5.0, 8.0, 10.0)]
    assert until == pytest.approx([0.0, 0.5, 1.0 + 4.0, 1.0 + 6.0 + 2.0, 1.0 + 6.0 + 4.0])


INNER = '[algorithm.inner]\nname = "fedova"\n[algorithm.inner.inner]\nname = "fedavg"\nepochs = 1\n'
POLICY = 'name = "fedavg"\nepochs = 1\n[edge]\nspread = 10\nstay = 2.0\npolicy = '
CHOICE = 'name = "fedavg"\nepochs = 1\n[edge]\nspread = 10\nstay = 2.0\nchoose = '
PARTIAL = '{name = "partial_work", seconds = 0.0745}\n'
ALONE = '[algorithm.inner]\nname = "fedavg"\nepochs = 1\n'
LATE = '[algorithm.inner]\nname = "fedbuff"\nbuffer = 2\n' + INNER.replace("[algorithm.", "[algorithm.inner.")
KILLED = {
    "fedbuff": f'name = "fedbuff"\nbuffer = 2\n{INNER}[edge]\nspread = 10\n',
    "fedasync": f'name = "fedasync"\n{INNER}[edge]\nspread = 10\nstay = 2.0\n',
    "deadline": POLICY + '{name = "deadline", seconds = 0.09}\n',
    "first_of": POLICY + '{name = "first_of", count = 4}\n',
    "averaged": f'name = "averaged"\nwindow = 5\n{LATE}[edge]\nspread = 10\n',
    "speed": CHOICE + '"speed"\n',
    "labels": CHOICE + '"labels"\n',
    "partial_work": POLICY + PARTIAL,
    "partial_work_fedprox": POLICY.replace("fedavg", "fedprox") + PARTIAL,
    "partial_work_fednova": POLICY.replace("fedavg", "fednova") + PARTIAL,
    "leaving": POLICY.replace("policy = ", ""),
    "fedbuff_fedavg": f'name = "fedbuff"\nbuffer = 2\n{ALONE}[edge]\nspread = 10\n',
    "fedasync_fedprox": f'name = "fedasync"\n{ALONE.replace("fedavg", "fedprox")}[edge]\nspread = 10\n',
}
NOBODY_LEAVES = ("fedbuff", "averaged", "fedbuff_fedavg", "fedasync_fedprox")


def killed(name: str, rounds: int) -> str:
    text = TOML.replace('name = "fedavg"\nepochs = 1\n', KILLED[name])
    text = text.replace("checkpoint_every = 2", "checkpoint_every = 5")
    return text.replace("rounds = 4", f"rounds = {rounds}")


@pytest.mark.parametrize("name", KILLED)
def test_a_run_that_was_killed_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """kill -9 in the middle, twice."""
    (tmp_path / "experiment.toml").write_text(killed(name, 60))
    words = ["-m", "fedge", "run", str(tmp_path / "experiment.toml"), "--quiet", "--no-report"]
    words += ["--out", str(tmp_path / "killed")]
    label, seen = KILLED[name].split('"')[1], 0
    rounds = tmp_path / "killed" / label / "rounds.jsonl"
    for more in ([], ["--resume"]):
        process = warm.start([*words, *more], env={**os.environ, "OMP_NUM_THREADS": "1"})
        while process.is_alive() and (not rounds.exists() or rounds.read_bytes().count(b"\n") < seen + 7):
            time.sleep(0.02)
        seen = rounds.read_bytes().count(b"\n")
        process.kill()
        process.join()
    assert not (rounds.parent / "summary.json").exists()
    (resumed,) = compare(parse(tomllib.loads(killed(name, 60))), tmp_path / "killed", resume=True)
    (whole,) = compare(parse(tomllib.loads(killed(name, 60))), tmp_path / "whole")
    assert resumed.run is not None
    assert whole.run is not None
    assert close(whole.run.params, resumed.run.params) == 0
    assert whole.run.ledger.rows == resumed.run.ledger.rows
    records = [[{**record, "seconds": None} for record in one.run.history] for one in (whole, resumed)]
    assert records[0] == records[1]
    assert all(record["virtual_seconds"] > 0 and record["joules"] > 0 for record in records[0])
    drops = [record["dropped"] for record in records[0]]
    assert any(drops) == (name not in NOBODY_LEAVES), "nobody was late, and nobody left"


def test_bytes_and_joules_by_hand() -> None:
    """53 parameters of 8 bytes: the first cohort is sent out once more than it answers."""
    found = run(fedge.FedBuff(fedavg(), buffer=3), rounds=3, cohort=3)
    rows = found.ledger.rows
    assert [row.down for row in rows] == [6 * 424, 3 * 424, 3 * 424]
    assert [row.up for row in rows] == [3 * 428] * 3
    plain = Plain(found.algorithm, 3)
    d, joules = plain.devices, 0.0
    for _ in range(3):
        client = min(plain.flights, key=lambda flight: flight[:2])[2]
        n = len(plain.where.examples(client))
        joules += d.receive_watts[client] * 8 * 424 / d.down[client] + d.transmit_watts[client] * 8 * 428 / d.up[client]
        joules += d.compute_watts[client] * 2 * n * 210 / d.flops[client]
        plain.event()
    assert found.history[0]["joules"] == pytest.approx(joules)


def test_rare_classes_are_not_waited_for() -> None:
    """Every class has its own number of versions, as many as its own clients filled its buffer."""
    found = run(fedge.FedBuff(fedge.FedOVA(fedavg(2), classes=3), buffer=2), rounds=10, cohort=5)
    versions = found.state["events"]["versions"]
    assert len(set(versions)) > 1
    assert found.history[-1]["staleness"] > 0


def loud(clients: Any, factor: float) -> fedge.Federation:
    """Some clients measure in other units."""
    where = ragged(toy_data())
    x = where.data.train_x.clone()
    for client in clients:
        x[where.examples(client)] *= factor
    return fedge.Federation(replace(where.data, train_x=x), [where.examples(k).numpy() for k in range(7)])


@pytest.mark.parametrize("kind", [lambda one: fedge.FedBuff(one, buffer=3), fedge.FedAsync])
def test_uploads_that_are_not_finite_are_dropped_and_end_the_run_as_those_of_cohorts_do(kind: Any) -> None:
    """A first step of 1e9 times 1e305 is infinite at every client, whichever units of its network are dead."""
    records = list[Any]()
    with pytest.raises(
        TooFewReplies, match=r"round 5: task 'train' has good uploads of 0 clients, 1 needed .*lower the"
    ):
        run(kind(fedavg(lr=1e9)), where=loud(range(7), 1e305), rounds=9, on_round=records.append)
    assert [len(record["dropped"]) for record in records] == [3] * 4
    assert {drop["reason"] for record in records for drop in record["dropped"]} == {"'delta/fc1.weight' is not finite"}
    assert all("0 clients, 1 needed" in record["skipped"] and record["virtual_seconds"] > 0 for record in records)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_uploads_that_are_far_larger_than_usual_are_refused(name: str, tmp_path: Path) -> None:
    """Whoever is usual: the same client is refused in every answer, and a resumed run knows what is usual."""
    options: dict[str, Any] = {"where": loud([1], 1e6), "cohort": 5}
    whole = run(ALGORITHMS[name](), rounds=12, **options)
    dropped = [drop for record in whole.history for drop in record["dropped"]]
    assert {drop["client"] for drop in dropped} == {1}
    assert all("over 1000 times the usual" in drop["reason"] for drop in dropped)
    assert max(float(leaf.abs().max()) for leaf in whole.params.values()) < 100
    observe = fedge.Observe(checkpoint_every=1)
    run(ALGORITHMS[name](), rounds=5, out=tmp_path / "a", observe=observe, **options)
    again = run(ALGORITHMS[name](), rounds=12, out=tmp_path / "a", observe=observe, resume=True, **options)
    assert close(whole.params, again.params) == 0
    assert dropped == [drop for record in again.history for drop in record["dropped"]]


def test_a_weight_beyond_what_a_client_may_have_is_refused() -> None:
    found = run(fedge.FedAsync(fedavg()), engine={"max_weight": 20.0})
    dropped = {(drop["client"], drop["reason"]) for record in found.history for drop in record["dropped"]}
    told = "weight {} is not in (0, 20], the most that this client may weigh"
    assert dropped
    assert dropped <= {(4, told.format(24)), (6, told.format(28))}


def test_sizes_by_client_are_those_of_a_dict() -> None:
    rng, known, plain = np.random.default_rng(0), dict[str, torch.Tensor](), dict[int, list[float]]()
    for _ in range(30):
        clients, table = rng.integers(0, 40, 9), rng.random((9, 2))
        table[rng.random(9) < 0.2] = np.inf
        known = noted(known, clients, table)
        for client in set(clients.tolist()):
            mine = np.sort(table[(clients == client) & np.isfinite(table).all(1)], axis=0)
            plain |= {client: mine[(len(mine) - 1) // 2].tolist()} if len(mine) else {}
        assert dict(zip(known["clients"].tolist(), known["sizes"].tolist(), strict=True)) == plain
        assert known["clients"].tolist() == sorted(plain)


def test_after_a_round_of_too_few_others_are_sent_out(tmp_path: Path) -> None:
    options: dict[str, Any] = {"cohort": 4, "stay": 0.05, "engine": {"min_replies": 3}}
    algorithm, observe = ALGORITHMS["fedbuff"], fedge.Observe(checkpoint_every=1)
    whole = run(algorithm(), rounds=12, **options)
    skipped = [record["round"] for record in whole.history if "skipped" in record]
    assert 0 < len(skipped) < 12
    assert any(one + 1 not in skipped for one in skipped[:-1])  # what follows is not the same round again
    for end in (skipped[0], skipped[0] + 1):
        run(algorithm(), rounds=end, out=tmp_path / str(end), observe=observe, **options)
        again = run(algorithm(), rounds=12, out=tmp_path / str(end), observe=observe, resume=True, **options)
        assert close(whole.params, again.params) == 0


def test_a_state_without_sizes_goes_on() -> None:
    half = run(ALGORITHMS["fedbuff"](), rounds=2)
    whole = run(ALGORITHMS["fedbuff"](), rounds=2, start=half)
    for name in ("sizes", "round"):
        del half.state["events"][name]
    assert close(whole.params, run(ALGORITHMS["fedbuff"](), rounds=2, start=half).params) == 0


def test_what_cannot_be_asynchronous_is_refused() -> None:
    with pytest.raises(TypeError, match="FedBuff is around FedNova, it needs FedAvg or FedProx"):
        fedge.FedBuff(fedge.FedNova(toy_model()))
    with pytest.raises(ValueError, match="alpha is 2, it must be above 0 and at most 1"):
        fedge.FedAsync(fedavg(), alpha=2)
    algorithm, where = ALGORITHMS["fedbuff"](), ragged(toy_data())
    with pytest.raises(ValueError, match=r"FedBuff needs to know who answers when: put a fedge\.edge\.Clock"):
        fedge.train(algorithm, where, rounds=1)
    with pytest.raises(ValueError, match="the link is a Loopback"):
        fedge.train(algorithm, where, rounds=1, link=Clock(Loopback(algorithm, where), where, FLEET))
    with pytest.raises(ValueError, match=r"waits for nobody, but policy is Deadline\(seconds=1\.0\): leave it out"):
        run(algorithm, policy=Deadline(1.0))
    with pytest.raises(ValueError, match=r"for nobody, but choice is Choice\(by='speed', among=3\): leave it out"):
        run(algorithm, choice=Choice("speed"))


@pytest.mark.parametrize("name", ["fedbuff", "fedasync", "averaged"])
def test_a_draw_of_cohorts_is_refused(name: str, tmp_path: Path) -> None:
    """It was ignored."""
    kind = "FedAsync" if name == "fedasync" else "FedBuff"
    told = rf"sampling is 'poisson', but {kind} draws no cohorts: 3 clients are at work at any time; leave sampling out"
    algorithm = {"averaged": fedge.Averaged(ALGORITHMS["fedbuff"]())}.get(name) or ALGORITHMS[name]()
    with pytest.raises(ValueError, match=told):
        run(algorithm, sampling="poisson")
    table = tomllib.loads(killed(name, 4).replace("cohort = 6", 'cohort = 3\nsampling = "poisson"'))
    with pytest.raises(ExperimentError, match=f"{name}: {told}"):
        compare(parse(table), tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("wrap", [lambda one: one, fedge.Averaged])
def test_a_buffer_that_no_run_can_fill_is_refused(wrap: Any) -> None:
    """The model never moved, and nothing was said."""
    told = "buffer is 10, but 3 rounds of 3 clients are 9 answers, so it never fills and the model never moves: lower"
    with pytest.raises(ValueError, match=told):
        run(wrap(fedge.FedBuff(fedavg(), buffer=10)), rounds=3, cohort=3)
    half = run(fedge.FedBuff(fedavg(), buffer=9), rounds=3, cohort=3)
    run(fedge.FedBuff(fedavg(), buffer=10), rounds=1, cohort=3, start=half)  # four rounds in all
    with pytest.raises(ValueError, match="each of the 3 classes has a buffer of its own"):
        run(fedge.FedBuff(fedge.FedOVA(fedavg(2), classes=3), buffer=10), rounds=3, cohort=3)


def test_a_buffer_that_no_run_can_fill_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    table = tomllib.loads(killed("fedbuff_fedavg", 4).replace("buffer = 2", "buffer = 100"))
    with pytest.raises(ExperimentError, match="fedbuff: buffer is 100, but 4 rounds of 6 clients are 24 answers"):
        compare(parse(table), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_server_that_took_no_step_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Every client holds one class, so no buffer fills although there are as many answers."""
    data = toy_data()
    single = fedge.Federation(data, [(data.train_y == label).nonzero().flatten().numpy() for label in range(3)])
    algorithm = fedge.FedBuff(fedge.FedOVA(fedavg(2), classes=3), buffer=4)
    found = run(algorithm, rounds=2, cohort=2, where=single)
    assert sum(record["server_steps"] for record in found.history) == 0
    assert "the server took no step in 2 rounds" in caplog.text
    caplog.clear()
    run(fedge.FedBuff(fedavg(), buffer=2), rounds=2, cohort=2)
    assert not caplog.text


def test_a_link_that_events_would_pass_by_is_refused() -> None:
    """Liars that never lie would make it look safe."""
    algorithm, where = ALGORITHMS["fedbuff"](), ragged(toy_data())
    clock = Clock(attacked(algorithm, where, Attack("sign_flip"), share=0.3), where, FLEET)
    with pytest.raises(ValueError, match="the clock is around Attacked, which asynchronous training would pass by"):
        fedge.train(algorithm, where, rounds=2, cohort=3, link=clock)


def test_an_experiment_without_devices_says_so(tmp_path: Path) -> None:
    text = killed("fedbuff", 4).split("[edge]")[0]
    with pytest.raises(ExperimentError, match=r"fedbuff: FedBuff needs to know .* table \[edge\]"):
        compare(parse(tomllib.loads(text)), tmp_path / "a")


def test_a_wrapper_that_needs_rounds_says_so(tmp_path: Path) -> None:
    table = tomllib.loads(killed("fedbuff", 4))
    one = table["algorithm"][0] if isinstance(table["algorithm"], list) else table["algorithm"]
    table["algorithm"] = [{"name": "robust", "inner": one}]
    with pytest.raises(ExperimentError, match=r"robust: Robust needs rounds, and FedBuff has none: only Averaged goes"):
        compare(parse(table), tmp_path / "a")


@pytest.mark.parametrize("cohort", [100, 9000])
@pytest.mark.parametrize("name", ["fedbuff", "fedasync"])
def test_events_cost_little(name: str, cohort: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 clients; everything but the training itself. The limit is wide: machines differ and are shared."""
    data = toy_data(examples=10_000)
    where = fedge.Federation(data, torch.arange(10_000).view(-1, 1).numpy())
    inner = fedavg(epochs=1)
    algorithm = fedge.FedBuff(inner, buffer=50) if name == "fedbuff" else fedge.FedAsync(inner)
    link = Clock(Simulator(algorithm, where), where, Profiles("phone", spread=10.0))
    spent = 0.0
    events = link._events(algorithm)
    fold = Stack.fold

    def timed(self: Stack, jobs: Any) -> Any:
        nonlocal spent
        begin = time.process_time()
        found = fold(self, jobs)
        spent += time.process_time() - begin
        return found

    monkeypatch.setattr(Stack, "fold", timed)
    state = algorithm.init(parameters(algorithm.model))
    state, *_ = events.advance(state, 0, 1, cohort)
    begin, spent = time.process_time(), 0.0
    rounds = max(2, 1000 // cohort)
    for number in range(2, 2 + rounds):
        state, *_ = events.advance(state, 0, number, cohort)
    each = (time.process_time() - begin - spent) / (rounds * cohort)
    print(f"{1e6 * each:.1f} microseconds per event, {1e6 * spent / rounds / cohort:.1f} more to train")
    assert each < 500e-6


def test_a_run_in_which_everybody_leaves_says_so_and_ends() -> None:
    told = r"round 4: all 4 clients left before they had answered \(stay = 1e-06 s\): allow more time"
    with pytest.raises(TooFewReplies, match=told):
        run(fedge.FedBuff(fedavg(), buffer=2), cohort=4, stay=1e-6)
    run(fedge.FedBuff(fedavg(), buffer=2), cohort=4, stay=1e6)


REMEMBERS = {"server_momentum": 0.5, "server_lr": 0.5}
SERVERS = {
    "fedasync_shorter": lambda: fedge.FedAsync(fedavg(server_lr=0.5), alpha=0.7, staleness=1.0),
    "fedasync_momentum": lambda: fedge.FedAsync(fedavg(**REMEMBERS), alpha=0.7, staleness=1.0),
    "fedbuff_weighted_momentum": lambda: fedge.FedBuff(fedavg(**REMEMBERS), buffer=2, weighted=True, staleness=1.0),
}


@pytest.mark.parametrize("name", SERVERS)
def test_the_step_of_the_server_is_that_of_a_plain_loop(name: str) -> None:
    """Its length, its momentum, and weights and staleness with them: as sums of many steps, and one by one."""
    algorithm = SERVERS[name]()
    found, plain = run(algorithm, cohort=5), Plain(algorithm, 5)
    for _ in range(4 * 5):
        plain.event()
    assert max(plain.old) > 1
    assert close(found.params, plain.models[0]) < 1e-11


def test_an_upload_that_was_refused_does_not_count_in_a_later_round() -> None:
    """It may be computed, with whatever is under way, rounds before its client answers."""
    found = run(fedge.FedAsync(fedavg()), where=loud([1], 1e6), cohort=2, rounds=40)
    told = [record["dropped"] for record in found.history if 1 in record["cohort"]]
    assert all(told)
    assert len(told) > 3


def test_answers_in_buffers_count_unless_all_that_were_looked_at_are_bad() -> None:
    """Three answers, two of which fill a buffer and are bad: the third, which waits, does not save the round."""
    records = list[Any]()
    with pytest.raises(TooFewReplies):
        run(fedge.FedBuff(fedavg(lr=1e9), buffer=2), where=loud(range(7), 1e305), rounds=9, on_round=records.append)
    assert records
    assert all("skipped" in record for record in records)


def test_rounds_that_are_skipped_one_after_another_are_not_the_same_round() -> None:
    records = list[Any]()
    with pytest.raises(TooFewReplies):
        run(fedge.FedBuff(fedavg(), buffer=2), cohort=4, stay=1e-3, rounds=9, on_round=records.append)
    assert len(records) > 2
    assert len({record["virtual_seconds"] for record in records}) == len(records)
