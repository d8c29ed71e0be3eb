"""Devices, the virtual clock and its policies, against calculations by hand and a plain loop."""

from __future__ import annotations

import math
import os
import re
import resource
import time
import tomllib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import fedge
from fedge.core import At
from fedge.edge import (
    Cell,
    Choice,
    Clock,
    Deadline,
    FirstOf,
    PartialWork,
    Profiles,
    Table,
    WaitForAll,
    accuracy_by_kind,
    by_kind,
    table,
)
from fedge.edge.devices import Devices, Drawn
from fedge.edge.draws import uniform
from fedge.edge.policies import Policy
from fedge.edge.profiles import NETWORKS, PROFILES
from fedge.edge.settings import Edge
from fedge.edge.table import COLUMNS, write
from fedge.edge.work import Workload
from fedge.engine import BaseLink, Loopback, Simulator, TooFewReplies
from fedge.experiment import Experiment, ExperimentError, build, compare, load, parse
from fedge.keys import COHORT, TIES, choose, fold
from fedge.loop import cohorts
from fedge.runs.folder import RunFolderError
from tests.cases import EACH_PATH, algorithms, cases, close, ragged, toy_data, toy_model

LIMITED = (EACH_PATH | {"fednova_decay", "fedprox", "fedova_fednova", "lbfgs_next"}) - {"private_fedova"}
SEED = 3
SLOW = Profiles(("phone", "raspberry_pi"), spread=30.0, correlation=0.5, seed=4)


def federation() -> fedge.Federation:
    return ragged(toy_data())


def fedavg(**options) -> fedge.FedAvg:
    return fedge.FedAvg(toy_model(), **({"lr": 0.2, "epochs": 2, "batch_size": 4} | options))


def device_file(path: Path, rows: list[tuple[float, ...]]) -> str:
    """flops, down, up, compute, receive and transmit watts, memory, latency."""
    lines = ["flops,down,up,compute_watts,receive_watts,transmit_watts,memory,latency"]
    path.write_text("\n".join([*lines, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return str(path)


def trained(algorithm, fleet=SLOW, policy: Policy | None = None, kind=Simulator, rounds=3, **options) -> fedge.Run:
    where = federation()
    link = Clock(kind(algorithm, where), where, fleet, policy, **options)
    return fedge.train(algorithm, where, rounds=rounds, cohort=5, seed=3, link=link)


# By hand


def test_three_clients_by_hand(tmp_path: Path) -> None:
    """53 parameters of 8 bytes; 210 FLOPs per example: 2 * 45 forwards, as much for weights, 2 * 15 for the hidden."""
    data = toy_data()
    where = fedge.Federation(data, [[0, 1, 2], [3, 4, 5, 6], [7]])
    rows = [(4e5, 8000.0, 4000.0, 2.0, 0.5, 1.0, 1e9, 0.0), (8e5, 4000.0, 2000.0, 3.0, 0.25, 2.0, 1e9, 0.5)]
    rows.append((2e5, 1000.0, 1000.0, 1.0, 1.0, 4.0, 1e9, 0.0))
    algorithm = fedavg(epochs=2, batch_size=2)
    link = Clock(Simulator(algorithm, where), where, Table(device_file(tmp_path / "d.csv", rows), 3))
    run = fedge.train(algorithm, where, rounds=2, link=link)
    bits_down, bits_up = 8 * 53 * 8, 8 * (53 * 8 + 4)
    down = [bits_down / 8000, bits_down / 4000, bits_down / 1000]
    work = [2 * 3 * 210 / 4e5, 2 * 4 * 210 / 8e5, 2 * 1 * 210 / 2e5]
    up = [bits_up / 4000, bits_up / 2000, bits_up / 1000]
    seconds = [down[0] + work[0] + up[0], 0.5 + down[1] + work[1] + up[1], down[2] + work[2] + up[2]]
    joules = [0.5 * down[0] + 2 * work[0] + up[0], 0.25 * down[1] + 3 * work[1] + 2 * up[1]]
    joules.append(down[2] + work[2] + 4 * up[2])
    for record in run.history:
        assert record["virtual_seconds"] == pytest.approx(max(seconds), rel=1e-14)
        assert record["joules"] == pytest.approx(sum(joules), rel=1e-14)
        assert record["late"] == []
    shown = run.history[0]["timeline"][0]["clients"][1]
    assert (shown[0], shown[5]) == (1, True)
    assert shown[1:5] == pytest.approx([0.5, down[1], work[1], up[1]])
    assert "timeline" not in run.history[1]
    assert run.summary()["virtual_seconds"] == pytest.approx(2 * max(seconds))
    assert run.summary()["joules"] == pytest.approx(2 * sum(joules))


def test_many_clients_have_a_closed_form() -> None:
    """C equal devices: T = 8 b / r + E n c / f + 8 (b + 4) / r', and C times the energy of one."""
    data, clients = toy_data(examples=3000), 1000
    where = fedge.Federation(data, torch.arange(3000).view(clients, 3).numpy())
    algorithm = fedavg(epochs=4)
    run = fedge.train(
        algorithm, where, rounds=1, link=Clock(Simulator(algorithm, where), where, Profiles("raspberry_pi"))
    )
    device, radio = PROFILES["raspberry_pi"], NETWORKS["wifi"]
    down, work, up = 8 * 424 / radio.down, 4 * 3 * 210 / device.flops, 8 * 428 / radio.up
    joules = radio.receive_watts * down + device.compute_watts * work + radio.transmit_watts * up
    assert run.history[0]["virtual_seconds"] == pytest.approx(radio.latency + down + work + up, rel=1e-12)
    assert run.history[0]["joules"] == pytest.approx(clients * joules, rel=1e-12)


def test_those_who_leave_are_as_many_as_the_closed_form_says() -> None:
    """P(left) = 1 - exp(-t / stay), and the phase lasts as long as the slowest who stayed."""
    data, clients = toy_data(examples=4000), 4000
    where = fedge.Federation(data, torch.arange(4000).view(clients, 1).numpy())
    algorithm = fedavg()
    fleet = Profiles("phone")
    t = fedge.train(algorithm, where, rounds=1, link=Clock(Simulator(algorithm, where), where, fleet))
    seconds = t.history[0]["virtual_seconds"]
    link = Clock(Simulator(algorithm, where), where, fleet, stay=2 * seconds)
    run = fedge.train(algorithm, where, rounds=1, link=link)
    gone, expected = len(run.history[0]["dropped"]), clients * (1 - math.exp(-0.5))
    assert abs(gone - expected) < 4 * math.sqrt(expected)
    assert all(drop["reason"].startswith("left after") for drop in run.history[0]["dropped"])
    assert run.history[0]["late"] == []
    assert run.history[0]["virtual_seconds"] == pytest.approx(seconds)
    assert run.history[0]["joules"] < t.history[0]["joules"]


# The clock changes nothing by itself


@pytest.mark.parametrize("name", cases(EACH_PATH))
@pytest.mark.parametrize("kind", [Simulator, Loopback])
def test_a_clock_alone_changes_no_bit(name: str, kind: type[BaseLink]) -> None:
    algorithm, where = algorithms()[name], federation()
    plain = fedge.train(algorithm, where, rounds=2, cohort=5, seed=3, link=kind(algorithm, where))
    timed = trained(algorithm, kind=kind, rounds=2)
    assert close(plain.params, timed.params) == 0
    assert plain.ledger.rows == timed.ledger.rows
    for before, after in zip(plain.history, timed.history, strict=True):
        assert {**before, "seconds": 0} == {**{key: after[key] for key in before}, "seconds": 0}
        assert after["virtual_seconds"] > 0
        assert after["joules"] > 0


@pytest.mark.parametrize("name", cases(EACH_PATH))
def test_counted_bytes_are_those_of_the_ledger(name: str) -> None:
    """What the clock counts before a phase is what the link counts in it."""
    algorithm, where = algorithms()[name], federation()

    class Compared(Clock):
        def ask(self, at, asks, clients):
            before = len(self.ledger)
            replies = super().ask(at, asks, clients)
            for ask, row in zip(asks, self.ledger.rows[before:], strict=True):
                work = self.load.of(ask, clients.numpy())
                assert (work.down.sum(), work.up.sum()) == (row.down, row.up)
                assert int((work.jobs > 0).sum()) == row.clients
            return replies

        def share(self, at, wanted):
            shared = super().share(at, wanted)
            assert self.load.share(wanted) * where.clients == self.ledger.rows[-1].down
            return shared

    fedge.train(algorithm, where, rounds=2, cohort=5, seed=3, link=Compared(Simulator(algorithm, where), where, SLOW))


def test_flops_are_those_of_the_layers() -> None:
    where = fedge.Federation(
        fedge.data.Data(torch.randn(4, 1, 8, 8), torch.arange(4) % 2, torch.randn(2, 1, 8, 8), torch.arange(2), 2),
        [[0, 1, 2], [3]],
    )
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(108, 2))
    algorithm = fedge.FedAvg(net, epochs=1, batch_size=2)
    flow = algorithm.round(algorithm.init({name: leaf.detach() for name, leaf in net.named_parameters()}))
    conv, linear = 2 * 36 * 27, 2 * 108 * 2  # forwards; the first layer's inputs need no gradient
    work = Workload(algorithm, where).of(next(flow), np.array([0, 1]))
    assert work.flops.tolist() == [3 * (2 * conv + 3 * linear), 2 * conv + 3 * linear]
    assert work.steps.tolist() == [[2, 1]]


def test_rows_are_those_of_the_labels_that_a_client_holds() -> None:
    """Many clients looked up at once, in any order and again, against one at a time."""
    where, algorithm = federation(), fedge.FedOVA(fedge.FedAvg(toy_model(outputs=2), epochs=1), classes=3)
    load = Workload(algorithm, where)
    (task,) = load.tasks.values()
    held = [tuple(sorted(set(where.data.train_y[where.examples(k)].tolist()))) for k in range(where.clients)]
    for clients in ([3], [6, 0, 3, 1], [], list(range(7))):
        assert load.rows(np.array(clients, np.int64), task) == [held[client] for client in clients]
    assert len(set(held)) > 1


# Policies against a plain loop


def plain_phase(seconds: list[float], left: list[float], policy: Policy) -> tuple[list[bool], float]:
    """Whose answers count and when the phase ends: events one after another."""
    events = sorted((min(t, out), k, t <= out) for k, (t, out) in enumerate(zip(seconds, left, strict=True)))
    good, now = [False] * len(seconds), 0.0
    for when, k, answers in events:
        if isinstance(policy, Deadline) and when > policy.seconds:
            return good, policy.seconds
        now = when
        good[k] = answers
        if isinstance(policy, FirstOf) and sum(good) == policy.count:
            break
    return good, now


@pytest.mark.parametrize("policy", [WaitForAll(), Deadline(1.0), Deadline(0.2), FirstOf(3), FirstOf(100)])
@pytest.mark.parametrize("stay", [math.inf, 1.0])
def test_policies_agree_with_a_plain_loop_over_events(policy: Policy, stay: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        seconds = rng.lognormal(0, 1, 9)
        left = rng.exponential(1.0, 9) if stay == 1 else np.full(9, np.inf)
        good, end = plain_phase(seconds.tolist(), left.tolist(), policy)
        cut = policy.cut(seconds, left, lambda: rng.random(9))
        assert cut.good.tolist() == good
        assert cut.seconds == end


def test_the_late_are_dropped_and_what_they_moved_is_counted() -> None:
    algorithm = fedavg()
    everybody = trained(algorithm, rounds=1)
    (phase,) = everybody.history[0]["timeline"]
    seconds = {row[0]: sum(row[1:5]) for row in phase["clients"]}
    limit = sorted(seconds.values())[2]  # the third of five is just in time
    run = trained(algorithm, policy=Deadline(limit), rounds=1)
    late = sorted(client for client, taken in seconds.items() if taken > limit)
    assert run.history[0]["late"] == late
    assert {(d["client"], d["reason"]) for d in run.history[0]["dropped"]} == {
        (client, f"late: not done after {limit:g} s") for client in late
    }
    assert run.history[0]["virtual_seconds"] == limit
    row, whole = run.ledger[0], everybody.ledger[0]
    assert row.clients == 5
    down = {r[0]: r for r in phase["clients"]}
    moved = sum(int(424 * min(1.0, (limit - down[c][1]) / down[c][2])) for c in late)
    assert row.down == 3 * 424 + moved <= whole.down
    sent = sum(int(428 * min(1.0, max(0.0, limit - sum(down[c][1:4])) / down[c][4])) for c in late)
    assert row.up == 3 * 428 + sent < whole.up
    first = trained(algorithm, policy=FirstOf(3), rounds=1)
    assert first.history[0]["late"] == late
    assert close(first.params, run.params) == 0
    assert first.history[0]["virtual_seconds"] == limit
    only = [client for client in seconds if client not in late]
    where = federation()
    kept = fedge.train(algorithm, where, rounds=1, seed=3, link=Only(Simulator(algorithm, where), only))
    assert close(kept.params, run.params) == 0


class Only(fedge.engine.Around):
    """Asks these clients alone."""

    def __init__(self, inner: BaseLink, only: list[int]) -> None:
        super().__init__(inner)
        self.only = only

    def ask(self, at, asks, clients):
        return self.inner.ask(at, asks, torch.tensor(self.only))


def test_nobody_in_time_is_an_error_that_says_what_is_needed() -> None:
    with pytest.raises(TooFewReplies, match=r"of 5 clients the fastest needs .* s, with Deadline\(seconds=1e-09\)"):
        trained(fedavg(), policy=Deadline(1e-9))


@pytest.mark.parametrize("kind", [Simulator, Loopback])
def test_too_few_in_time_skip_a_round_and_do_not_end_the_run(kind: type[BaseLink]) -> None:
    """`min_replies` counts those whose answers count; who was late, gone or asleep is named."""
    algorithm, where = fedavg(), federation()
    sleepy = Profiles("phone", spread=30.0, availability=0.8)
    link = Clock(kind(algorithm, where, min_replies=3), where, sleepy, Deadline(0.0715), stay=2.0)
    run = fedge.train(algorithm, where, rounds=8, cohort=5, seed=3, link=link)
    few = [record for record in run.history if 5 - len(record["dropped"]) < 3]
    assert [record for record in run.history if "skipped" in record] == few
    assert 0 < len(few) < 8
    assert all(record["virtual_seconds"] > 0 and record["joules"] > 0 for record in few)
    assert all(re.search(r"3 needed .* \(\d late or gone, \d not available\)$", one["skipped"]) for one in few)
    for record, row in zip(run.history, run.ledger, strict=True):
        asleep = [drop for drop in record["dropped"] if drop["reason"] == "not available in this round"]
        assert row.clients == 5 - len(asleep)


def test_a_client_that_is_not_available_is_not_asked() -> None:
    run = trained(fedavg(), fleet=Profiles("phone", availability=0.5), rounds=6)
    reasons = [drop["reason"] for record in run.history for drop in record["dropped"]]
    assert set(reasons) == {"not available in this round"}
    assert 5 < len(reasons) < 25
    assert all(not record["late"] for record in run.history)
    assert [row.clients for row in run.ledger] == [5 - len(record["dropped"]) for record in run.history]


# Partial work


@pytest.mark.parametrize(
    "name", cases(LIMITED, (name for name in sorted(algorithms()) if not name.startswith("private")))
)
def test_partial_work_is_the_same_on_every_link(name: str) -> None:
    algorithm, where = algorithms()[name], federation()
    probe = trained(algorithm, rounds=1).history[0]["timeline"]
    policy = PartialWork(max(sum(row[1:5]) for row in probe[0]["clients"]) * 0.4)
    runs = [trained(algorithm, policy=policy, kind=kind, rounds=2) for kind in (Simulator, Loopback)]
    assert close(runs[0].params, runs[1].params) < 1e-11
    assert runs[0].ledger.rows == runs[1].ledger.rows
    single = Clock(Simulator(algorithm, where, chunk=1), where, SLOW, policy)
    assert close(runs[0].params, fedge.train(algorithm, where, rounds=2, cohort=5, seed=3, link=single).params) < 1e-11


def test_partial_work_does_the_steps_that_fit() -> None:
    """FedNova's weights: every update is divided by the steps that were done, against a plain loop."""
    where, algorithm = federation(), fedge.FedNova(toy_model(), lr=0.1, epochs=3, batch_size=4)
    whole = Clock(Simulator(algorithm, where), where, SLOW)
    times = {}

    class Seen(Clock):
        def _carry(self, at, asks, phase, end):
            times.update(dict(zip(phase.clients.tolist(), phase.seconds.tolist(), strict=True)))
            times["limits"] = asks[0].limits
            return super()._carry(at, asks, phase, end)

    probe = fedge.train(algorithm, where, rounds=1, seed=3, link=whole).history[0]["timeline"][0]["clients"]
    full = {row[0]: row for row in probe}
    budget = sorted(sum(row[1:5]) for row in probe)[3]
    run = fedge.train(
        algorithm, where, rounds=1, seed=3, link=Seen(Simulator(algorithm, where), where, SLOW, PartialWork(budget))
    )
    steps = {k: 3 * -(-len(where.examples(k)) // min(4, len(where.examples(k)))) for k in range(where.clients)}
    for k, row in full.items():
        n, room = len(where.examples(k)), budget - row[1] - row[2] - row[4]
        visits = np.cumsum([min(4, n - first) for first in range(0, n, 4)] * 3)
        fits = int((visits / visits[-1] * row[3] <= room * (1 + 1e-12)).sum())
        assert times["limits"][k] == (max(1, fits),)
        assert times[k] <= budget * (1 + 1e-12) or times["limits"][k] == (1,)
    assert len({times["limits"][k][0] / steps[k] for k in steps}) > 1, "nobody was cut short"
    assert run.history[0]["late"] == []
    assert close(run.params, plain_fednova(algorithm, where, {k: times["limits"][k][0] for k in steps})) < 1e-12


def plain_fednova(algorithm: fedge.FedNova, where: fedge.Federation, limits: dict[int, int]) -> dict:
    """One round of Eq. 6 with so many steps of each client, one after another."""
    from fedge.engine.clients.batches import client_key, one_client
    from fedge.handle import Handle, parameters

    model, start = Handle(algorithm.model, algorithm.loss), parameters(algorithm.model)
    total, direction, reach = 0.0, {n: torch.zeros_like(p) for n, p in start.items()}, 0.0
    for client, steps in limits.items():
        chosen = where.examples(client)
        batches = one_client(
            fedge.Task(None, None, None, algorithm.epochs, algorithm.batch_size),
            where.data.train_x[chosen],
            where.data.train_y[chosen],
            client_key(At(3, 1, 0), client),
        )
        params = start
        for _, batch in zip(range(steps), batches, strict=False):
            grad = model.grad(params, batch)
            params = {n: p - algorithm.lr * grad[n] for n, p in params.items()}
        n = len(chosen)
        total, reach = total + n, reach + n * steps
        direction = {name: d + n * (start[name] - params[name]) / steps for name, d in direction.items()}
    return {name: start[name] - reach / total * direction[name] / total for name in start}


@pytest.mark.parametrize("kind", [Simulator, Loopback])
def test_partial_work_that_nobody_can_keep_is_refused(kind: type[BaseLink]) -> None:
    """Every phone waits 0.07 s before anything moves: each did one step all the same, and nothing was said."""
    told = r"round 1: nobody can keep the time of 'train': of 5 clients the fastest needs 0\.07.* s for one step"
    with pytest.raises(TooFewReplies, match=told + r".*with PartialWork\(seconds=0\.05\): allow more time"):
        trained(fedavg(), Profiles("phone", spread=10.0), PartialWork(0.05), kind)


def test_partial_work_that_one_client_can_keep_is_done() -> None:
    """One step of the fastest is just in time; without its rounding it is not."""
    fleet = Profiles("microcontroller", "wifi", spread=10.0)
    (phase,) = trained(fedavg(), fleet, PartialWork(0.0102), rounds=1).history[0]["timeline"]
    least = min(sum(row[1:5]) for row in phase["clients"])
    with pytest.raises(TooFewReplies, match="nobody can keep the time"):
        trained(fedavg(), fleet, PartialWork(0.01), rounds=1)
    assert trained(fedavg(), fleet, PartialWork(least), rounds=1).history[0]["late"] == []


def test_a_resumed_run_is_not_looked_at_again(tmp_path: Path) -> None:
    """A later cohort may have nobody who keeps the budget: each does one step."""
    algorithm, where, file = fedavg(), federation(), tmp_path / "devices.csv"
    file.write_text("flops,down,up,latency\n" + "".join(f"1e6,1e6,1e6,{0.0 if k == 3 else 1.0}\n" for k in range(7)))
    draw = cohorts(7, 1)
    seed = next(seed for seed in range(100) if [int(draw(At(seed, r, 0))) == 3 for r in (1, 2)] == [True, False])

    def run(rounds: int, resume: bool = False) -> fedge.Run:
        link = Clock(Simulator(algorithm, where), where, Table(str(file), 7), PartialWork(0.1))
        return fedge.train(
            algorithm, where, rounds=rounds, cohort=1, seed=seed, link=link, out=tmp_path / "a", resume=resume
        )

    run(1)
    assert run(2, resume=True).history[1]["cohort"] != [3]


def test_a_refused_run_is_refused_again(tmp_path: Path) -> None:
    algorithm, where = fedavg(), federation()
    for resume in (False, True):
        link = Clock(Simulator(algorithm, where), where, Profiles("phone"), PartialWork(0.05))
        with pytest.raises(TooFewReplies, match="round 1: nobody can keep the time"):
            fedge.train(algorithm, where, rounds=2, cohort=3, link=link, out=tmp_path / "a", resume=resume)


def test_limits_below_one_are_refused() -> None:
    where, algorithm = federation(), fedavg()
    flow = algorithm.round(algorithm.init({n: p.detach() for n, p in algorithm.model.named_parameters()}))
    ask = fedge.core.replace(next(flow), limits={0: (0,)})
    with pytest.raises(ValueError, match="0 steps of 'train': at least 1"):
        Simulator(algorithm, where).ask(At(0, 1, 0), (ask,), torch.tensor([0, 1]))


# Resuming


@pytest.mark.parametrize(
    "options",
    [
        {"policy": FirstOf(3)},
        {"policy": PartialWork(0.06)},
        {"stay": 1.0},
        {"choice": Choice("speed", 3)},
        {"choice": Choice("labels", 3)},
    ],
    ids=["first", "partial", "stay", "speed", "labels"],
)
def test_resume_ends_with_the_same_bits(options: dict, tmp_path: Path) -> None:
    algorithm, where = algorithms()["sharing_fedova"], federation()

    def run(rounds: int, out: Path, resume: bool = False) -> fedge.Run:
        link = Clock(Simulator(algorithm, where), where, SLOW, **options)
        observe = fedge.Observe(checkpoint_every=2)
        return fedge.train(
            algorithm, where, rounds=rounds, cohort=3, seed=3, link=link, out=out, resume=resume, observe=observe
        )

    whole = run(5, tmp_path / "a")
    run(3, tmp_path / "b")
    again = run(5, tmp_path / "b", resume=True)
    assert close(whole.params, again.params) == 0
    assert whole.ledger.rows == again.ledger.rows
    plain = fedge.train(algorithm, where, rounds=5, cohort=3, seed=3)
    evenly = [record["cohort"] for record in plain.history] == [record["cohort"] for record in whole.history]
    assert evenly == ("choice" not in options), "the choice chose nobody"
    drop = ("seconds",)
    assert [{k: v for k, v in r.items() if k not in drop} for r in whole.history] == [
        {k: v for k, v in r.items() if k not in drop} for r in again.history
    ]
    link = Clock(Simulator(algorithm, where), where, Profiles("laptop"))
    with pytest.raises(ValueError, match="the run was timed with"):
        fedge.train(algorithm, where, rounds=6, cohort=3, seed=3, link=link, out=tmp_path / "b", resume=True)


def test_a_run_does_not_go_on_with_a_file_of_devices_that_has_changed(tmp_path: Path) -> None:
    algorithm, where, file = fedavg(), federation(), tmp_path / "devices.csv"

    def run(rounds: int, resume: bool = False) -> fedge.Run:
        link = Clock(Simulator(algorithm, where), where, Table(str(file), where.clients))
        return fedge.train(algorithm, where, rounds=rounds, cohort=3, link=link, out=tmp_path / "a", resume=resume)

    file.write_text("flops,down,up\n1e9,1e6,1e6\n2e9,1e6,1e6\n")
    first = run(2).history
    file.write_text("flops,down,up\n1e5,1e6,1e6\n2e9,1e6,1e6\n")
    with pytest.raises(RunFolderError, match=r"the devices in the file .*devices\.csv.* have changed since the run"):
        run(4, resume=True)
    file.write_text("up, down, flops\n1e6, 1e6, 1e9\n1e6, 1e6, 2e9\n")  # the same devices
    assert run(4, resume=True).history[:2] == first


# Privacy


def private(**options) -> fedge.Private:
    return fedge.Private(fedavg(), clients=7, **({"expected": 1, "noise": 1.0, "clip": 1.0} | options))


def test_private_algorithms_take_a_clock_without_choices() -> None:
    algorithm, where = private(), federation()
    link = Clock(Simulator(algorithm, where), where, SLOW)
    run = fedge.train(algorithm, where, rounds=6, cohort=1, seed=1, link=link)
    plain = fedge.train(algorithm, where, rounds=6, cohort=1, seed=1)
    assert close(plain.params, run.params) == 0
    empty = [record for record in run.history if not record["down_bytes"]]
    assert empty, "every round drew somebody"
    assert all((record["virtual_seconds"], record["joules"]) == (0.0, 0.0) for record in empty)
    assert all(record["virtual_seconds"] > 0 for record in run.history if record["down_bytes"])
    assert not {"late", "timeline"} & {key for record in run.history for key in record}


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"policy": FirstOf(3)}, "policy is FirstOf(count=3)"),
        ({"policy": Deadline(9.0)}, "policy is Deadline(seconds=9.0)"),
        ({"choice": Choice()}, "choice is Choice(by='speed', among=3)"),
    ],
)
def test_private_algorithms_refuse_policies(options: dict, given: str) -> None:
    algorithm, where = private(), federation()
    told = (
        f"Private counts on clients being drawn one by one .* on another client, but {re.escape(given)}: leave it out"
    )
    with pytest.raises(ValueError, match=told):
        Clock(Simulator(algorithm, where), where, SLOW, **options)


def test_private_algorithms_refuse_policies_before_any_run(tmp_path: Path) -> None:
    """The algorithms before it were trained first."""
    text = TOML.replace("[algorithm]", "[[algorithm]]") + '\n[[algorithm]]\nname = "private"\n'
    text += '[algorithm.inner]\nname = "fedavg"\n[edge]\nchoose = "labels"\n'
    with pytest.raises(ExperimentError, match=r"private, \[edge\]: .* client, but choose is 'labels': leave it out"):
        compare(parse(tomllib.loads(text)), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_private_algorithms_refuse_that_clients_leave_who_share_a_band() -> None:
    """One client more slows the others down, and more of them leave before they answer."""
    algorithm, where = private(), federation()
    with pytest.raises(ValueError, match="in a Cell they share a band, and with stay = 2"):
        Clock(Simulator(algorithm, where), where, Cell(), stay=2.0)
    Clock(Simulator(algorithm, where), where, Cell())
    Clock(Simulator(algorithm, where), where, SLOW, stay=2.0)


def test_chosen_cohorts_are_of_a_fixed_size() -> None:
    algorithm, where = fedavg(), federation()
    link = Clock(Simulator(algorithm, where), where, SLOW, choice=Choice())
    told = r"the link chooses cohorts by itself, of a fixed size: .*choose in \[edge\]"
    with pytest.raises(ValueError, match=told):
        fedge.train(algorithm, where, rounds=1, cohort=3, sampling="poisson", link=link)


def test_the_fastest_are_chosen_for_binary_models_too() -> None:
    """Labels of ten classes are none of a model with two outputs: they are counted as a row has them."""
    where = federation()
    algorithm = fedge.FedOVA(fedge.FedAvg(toy_model(outputs=2), epochs=1), classes=3)
    link = Clock(Simulator(algorithm, where), where, SLOW, choice=Choice("speed", 100))
    run = fedge.train(algorithm, where, rounds=1, cohort=3, link=link)
    assert len(run.history[0]["cohort"]) == 3
    plain = fedge.FedAvg(toy_model(outputs=2))
    binary = fedge.data.Data(**{**vars(where.data), "train_y": where.data.train_y % 2, "test_y": where.data.test_y % 2})
    alone = Workload(plain, fedge.Federation(binary, [where.examples(k).numpy() for k in range(where.clients)]))
    assert link.load.gradient_flops() == alone.gradient_flops() > 0


# Devices


def test_devices_do_not_depend_on_who_else_is_asked() -> None:
    for fleet in (SLOW, Cell(slowest=1e9)):
        many = fleet.devices(np.arange(1000))
        few = fleet.devices(np.array([7, 999]))
        assert all(a[[7, 999]].tolist() == b.tolist() for a, b in zip(many, few, strict=True))


@pytest.mark.parametrize("most", [1000, 999])
def test_devices_are_drawn_once(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedge.edge.devices.EVERYBODY", most)
    fleet = Profiles(("phone", "laptop"), spread=30.0, availability=0.7)
    drawn = Drawn(fleet, 1000)
    for clients in ([5, 999, 0], [0, 7], [], [7, 5, 999]):
        ids = np.array(clients, np.int64)
        for now, before in zip(drawn(ids), fleet.devices(ids), strict=True):
            assert now.tolist() == before.tolist()
            assert now.dtype == before.dtype


@pytest.mark.parametrize("fleet", [SLOW, Cell()])
def test_shared_examples_take_time_however_many_clients_there_are(
    fleet: Profiles | Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above 100,000 clients they took none; now they are counted in blocks."""

    def told() -> tuple[float, float]:
        record = trained(algorithms()["sharing_fedova"], fleet=fleet, rounds=1).history[0]
        return record["virtual_seconds"], record["joules"]

    whole = told()
    monkeypatch.setattr("fedge.edge.clock.EVERYBODY", 2)
    assert told() == pytest.approx(whole, rel=1e-12)


def test_a_million_clients_cost_nothing() -> None:
    few = SLOW.devices(np.array([3, 999_999, 10**12]))
    assert len(set(few.flops.tolist())) == 3


def test_spread_and_correlation_are_as_stated() -> None:
    fleet = Profiles("phone", spread=10.0, correlation=0.7)
    found = fleet.devices(np.arange(200_000))
    low, middle, high = np.quantile(found.flops, [0.05, 0.5, 0.95])
    assert high / low == pytest.approx(10, rel=0.02)
    assert middle == pytest.approx(PROFILES["phone"].flops, rel=0.01)
    rho = np.corrcoef(np.log(found.flops), np.log(found.up))[0, 1]
    assert rho == pytest.approx(0.7, abs=0.01)
    assert np.allclose(found.up / found.down, NETWORKS["lte"].up / NETWORKS["lte"].down)


def test_kinds_have_equal_shares() -> None:
    found = Profiles(("microcontroller", "phone", "laptop")).devices(np.arange(30_000))
    assert np.bincount(found.kind) / 30_000 == pytest.approx([1 / 3] * 3, abs=0.01)
    assert set(found.flops[found.kind == 2]) == {PROFILES["laptop"].flops}


def test_the_cell_is_shannons() -> None:
    cell = Cell(fading=False, shadowing=0.0, seed=2)
    clients = np.arange(4)
    down, up = cell.rates(At(0, 1, 0), clients, cell.devices(clients))
    for k, metres in enumerate(cell.distance(clients)):
        loss = 128.1 + 37.6 * math.log10(metres / 1000)
        band = 20e6 / 4
        snr = 10 ** ((10 - loss - (-174 + 10 * math.log10(band))) / 10)  # all in dBm
        assert up[k] == pytest.approx(band * math.log2(1 + snr), rel=1e-12)
        assert down[k] == pytest.approx(band * math.log2(1 + snr * 1000), rel=1e-12)
    assert cell.devices(clients).compute_watts == pytest.approx(1e-28 * (2e9) ** 2 * 2e9)


@pytest.mark.parametrize(
    ("field", "value"),
    [("power_dbm", 1e4), ("noise_dbm", 1e5), ("noise_dbm", -1e5), ("station_dbm", -1e5), ("loss", 1e5), ("loss", -1e5),
     ("slope", 1e30), ("shadowing", 1e30), ("bandwidth", 1e-300), ("slowest", 1e-300), ("flops_per_cycle", 1e38)],
)  # fmt: skip
def test_a_cell_of_which_no_seconds_come_is_refused_by_the_field(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{field} is .*it must be from .* to"):
        Cell(**{field: value})


@pytest.mark.parametrize(
    "options",
    [{"loss": 300.0}, {"loss": -300.0}, {"noise_dbm": -300.0, "power_dbm": 300.0}, {"shadowing": 300.0, "slope": 300.0},
     {"bandwidth": 1e-9}, {"bandwidth": 1e30}, {"slowest": 1e-9, "fastest": 1e30, "kappa": 3e38}],
)  # fmt: skip
def test_seconds_and_joules_of_any_cell_are_numbers(options: dict) -> None:
    """Who hears nothing has a rate next to nothing: the seconds of its round were missing, and those of the run."""
    run = trained(fedavg(), Cell(**options), rounds=2)
    assert all(math.isfinite(record[name]) for record in run.history for name in ("virtual_seconds", "joules"))
    assert all(record["virtual_seconds"] > 0 for record in run.history)


def test_the_cell_fades_and_fills_its_disc() -> None:
    cell, clients = Cell(shadowing=0.0), np.arange(50_000)
    assert np.mean(cell.distance(clients) < 125) == pytest.approx(0.25, abs=0.01)
    assert np.quantile(Cell().gain(clients) / cell.gain(clients), 0.5) == pytest.approx(1, abs=0.03)
    few = clients[:2]
    rates = [cell.rates(At(0, r, 0), few, cell.devices(few))[1] for r in range(3000)]
    still = Cell(shadowing=0.0, fading=False).rates(At(0, 1, 0), few, cell.devices(few))[1]
    band, h = 10e6, np.array(rates)
    power = (2 ** (h / band) - 1) / (2 ** (still / band) - 1)  # the fading alone
    assert power.mean() == pytest.approx(1, abs=0.05)
    assert (power < math.log(2)).mean() == pytest.approx(0.5, abs=0.03)


def test_what_three_clients_of_a_cell_draw_and_compute() -> None:
    """By hand: watts of the device and not of the station, kappa f^3 while it computes, FLOPs per cycle."""
    cell, clients = Cell(slowest=1e9, fastest=3e9, flops_per_cycle=8.0, power_dbm=20.0, kappa=2e-28), np.arange(3)
    found = cell.devices(clients)
    clock = found.flops / 8
    assert (clock > 1e9).all()
    assert (clock < 3e9).all()
    assert len(set(clock)) == 3
    assert found.compute_watts == pytest.approx(2e-28 * clock**3)
    assert found.transmit_watts == pytest.approx([0.1] * 3)  # 20 dBm
    assert found.receive_watts == pytest.approx([0.0] * 3)


def test_fading_is_drawn_anew_per_phase_seed_and_direction() -> None:
    clients = np.arange(40)

    def fades(at: At, seed: int = 0) -> list[np.ndarray]:
        """h of every client, down and up: what the rates say of them."""
        still, moving = Cell(fading=False, seed=seed), Cell(seed=seed)
        devices, band = moving.devices(clients), 20e6 / 40
        pairs = zip(moving.rates(at, clients, devices), still.rates(at, clients, devices), strict=True)
        return [(2 ** (a / band) - 1) / (2 ** (b / band) - 1) for a, b in pairs]

    first = fades(At(0, 1, 0))
    assert np.array_equal(first, fades(At(0, 1, 0)))
    others = [fades(At(0, 2, 0)), fades(At(0, 1, 1)), fades(At(1, 1, 0)), fades(At(0, 1, 0), seed=1), first[::-1]]
    for other in others:
        assert abs(np.corrcoef(np.ravel(first), np.ravel(other))[0, 1]) < 0.5


def test_a_file_of_devices_reads_back(tmp_path: Path) -> None:
    found = SLOW.devices(np.arange(6))
    write(tmp_path / "devices.csv", found, SLOW.kinds)
    table = Table(str(tmp_path / "devices.csv"), 6)
    again = table.devices(np.arange(6))
    assert all(a.tolist() == b.tolist() for a, b in zip(found[:-1], again[:-1], strict=True))
    assert [table.kinds[k] for k in again.kind] == [SLOW.kinds[k] for k in found.kind]
    assert Devices._fields[: len(COLUMNS)] == COLUMNS
    drawn = Table(str(tmp_path / "devices.csv"), 10_000).devices(np.arange(10_000))
    assert set(drawn.flops) == set(found.flops)


def test_a_file_of_devices_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full in the middle leaves what was there; a link leads to the file that is replaced."""
    file, name = tmp_path / "devices.csv", tmp_path / "name.csv"
    found = SLOW.devices(np.arange(2000))
    write(file, found, SLOW.kinds)
    before = file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))  # ends a write as a full disk does
    try:
        with pytest.raises(OSError, match=r"File too large: '.*devices\.csv'"):
            write(file, found, SLOW.kinds)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (list(tmp_path.iterdir()), file.read_bytes()) == ([file], before)
    name.symlink_to(file)
    write(name, SLOW.devices(np.arange(6)), SLOW.kinds)
    assert name.is_symlink()
    assert file.read_text().count("\n") == 7


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (20, ""),
        (23, "has 23 rows for 20 clients: the last 3 are not used"),
        (15, r"has 15 rows for 20 clients: each client draws one, and (\d+) of the rows are drawn"),
    ],
)
def test_rows_that_are_not_as_many_as_clients_are_said(
    rows: int, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "d.csv"
    file.write_text("flops,down,up\n" + "".join(f"{k + 1}e9,1e6,1e6\n" for k in range(rows)))
    build(experiment(f"file = {str(file)!r}"))
    build(experiment(f"file = {str(file)!r}"))  # said once
    if not told:
        assert not caplog.text
        return
    (line,) = caplog.messages
    found = re.fullmatch(f"{re.escape(str(file))} {told}", line)
    assert found
    assert list(map(int, found.groups())) == [len(set(Table(str(file), 20).devices(np.arange(20)).flops))][: rows < 20]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flops,down\n1,2\n", "has no column 'up'"),
        ("flops,down,up,memry\n1,2,3,4\n", r"unknown column 'memry' \(did you mean 'memory'\?\)"),
        ("flops,down,up\n", "has no rows"),
        ("", "is empty: write flops,down,up in the first line, and a line for each device"),
        (" \n\n", "is empty: write flops,down,up in the first line"),
        ("flops;down;up\n1e9;2;3\n", r"has semicolons between its columns: write commas, and points in numbers"),
        ("flops\tdown\tup\n1e9\t2\t3\n", "has tabs between its columns: write commas"),
        ("flops,down,up\n1e9,2,3\n1e9,0,3\n", "line 3: down is '0', it must be a number above 0"),
        ("flops,down,up,availability\n1e9,2,3,1.5\n", "line 2: availability is '1.5', .* at least 0 and at most 1"),
        ("flops,down,up,latency\n1e9,2,3,inf\n", "line 2: latency is 'inf', it must be a number of at least 0"),
        (
            "flops,down,up\n5e-324,2,3\n",
            r"line 2: flops is '5e-324', it must be a number above 0 \(from 100000 to 1e\+30\)",
        ),
        ("flops,down,up\n1e9,5e-324,3\n", r"down is '5e-324', it must be a number above 0 \(from 1e-09 to 1e\+30\)"),
        (
            "flops,down,up\n10,2,3\n",
            "line 2: flops is '10', but it is in FLOP/s and at least 100000: write 1e10 for 10 GFLOP/s",
        ),
        ("flops,down,up\n1e5,2,3\n99999,2,3\n", "line 3: flops is '99999', but it is in FLOP/s and at least 100000"),
        ("flops,down,up\n1e9,2,1e300\n", "line 2: up is '1e300', it must be a number above 0"),
        ("flops,down,up,kind\n1,2,3," + "x" * 200_000, r"line \d: field larger than field limit"),
        ("flops,down,up,kind\n1,2,3,\udcff", "it is no text in UTF-8, see byte 25"),
        ("flops,flops,down,up\n1,2,3,4\n", "has the column 'flops' 2 times"),
        ("flops,down,up\n1,2,3\n1,2,3,4\n", "line 3: there are more numbers than the 3 columns"),
        ("flops,down,up,memory\n1e6,2,3,\n1e6,2,3\n", "line 3: there are fewer fields than the 4 columns"),
    ],
    ids=range(20),
)
def test_bad_files_of_devices_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        Table(str(tmp_path / "d.csv"), 3)


def test_what_is_no_file_or_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (Path(os.devnull), tmp_path):
        with pytest.raises(ValueError, match=f"cannot read the devices in {path}: it is no file"):
            Table(str(path), 3)
    monkeypatch.setattr(table, "LARGEST", 10)
    (tmp_path / "d.csv").write_text("flops,down,up\n1,2,3\n")
    with pytest.raises(ValueError, match=r"d.csv: it has 20 bytes, at most 10"):
        Table(str(tmp_path / "d.csv"), 3)


def test_a_file_of_many_kinds_is_read_at_once(tmp_path: Path) -> None:
    """Looking every kind up in a list took minutes."""
    kinds = [f"kind {place}" for place in range(60_000)]
    (tmp_path / "d.csv").write_text("kind,flops,down,up\n" + "".join(f"{kind},1e9,2,3\n" for kind in kinds))
    begin = time.perf_counter()
    table = Table(str(tmp_path / "d.csv"), 3)
    assert time.perf_counter() - begin < 20
    assert table.kinds == tuple(kinds)
    assert table.kind.tolist() == list(range(60_000))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Profiles("phones"), r"profile is 'phones' \(did you mean 'phone'\?\)"),
        (lambda: Profiles("fone"), r"profile is 'fone' \(did you mean 'phone'\?\)"),
        (lambda: Profiles(network="5g"), "network is '5g'"),
        (lambda: Profiles(spread=0.5), "spread is 0.5, it must be at least 1"),
        (lambda: Profiles(spread=1e300), r"spread is 1e\+300, it must be at least 1 .* and at most 1e\+30"),
        (lambda: Profiles(correlation=2.0), "correlation is 2.0, it must be between -1 and 1"),
        (lambda: Profiles("phone", availability=0.0), r"availability is 0\.0, it must be above 0 and at most 1"),
        (lambda: Profiles("phone", availability=1.5), r"availability is 1\.5, it must be above 0 and at most 1"),
        (lambda: Edge(stay=0.0), "stay is 0"),
        (lambda: Cell(slowest=2.0, fastest=1.0), "fastest is 1, it must be at least slowest"),
        (lambda: Deadline(0.0), "seconds is 0.0"),
        (lambda: FirstOf(0), "count is 0"),
        (lambda: Choice("size"), "by is 'size'"),
    ],
)
def test_impossible_settings_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# Choosing cohorts, and what that does


def test_the_fastest_of_the_candidates_are_chosen() -> None:
    where, algorithm = federation(), fedavg()
    link = Clock(Simulator(algorithm, where), where, SLOW, choice=Choice("speed", 100))
    draw = link.choosing(7, 3)
    times = fedge.train(algorithm, where, rounds=1, link=Clock(Simulator(algorithm, where), where, SLOW))
    seconds = {row[0]: sum(row[2:5]) for row in times.history[0]["timeline"][0]["clients"]}
    assert set(draw(At(0, 1, 0)).tolist()) == set(sorted(seconds, key=seconds.get)[:3])
    half = Clock(Simulator(algorithm, where), where, SLOW, choice=Choice("speed", 2)).choosing(7, 2)
    assert len({tuple(half(At(0, r, 0)).tolist()) for r in range(20)}) > 1  # candidates are drawn


def test_every_label_gets_its_turn() -> None:
    data = toy_data(examples=300, classes=3)
    order = torch.argsort(data.train_y, stable=True)
    parts = [*order[:240].view(24, 10), order[240:260], *order[260:300].view(4, 10)]  # label 2 is rare
    where, algorithm = fedge.Federation(data, [part.numpy() for part in parts]), fedavg()
    draw = Clock(Simulator(algorithm, where), where, SLOW, choice=Choice("labels", 10)).choosing(29, 6)
    held = [set(data.train_y[where.examples(c)].tolist()) for c in draw(At(0, 1, 0)).tolist()]
    assert [sum(label in some for some in held) for label in range(3)] == pytest.approx([2, 2, 2], abs=1)


def plain_rarest(held: list[set[int]], candidates: list[int], size: int) -> list[int]:
    """One after another, the first candidate whose labels the chosen ones hold least, in the mean over its labels."""
    chosen = list[int]()
    for _ in range(size):
        free = [client for client in candidates if client not in chosen]
        crowds = [
            sum(sum(label in held[other] for other in chosen) for label in held[client]) / len(held[client])
            for client in free
        ]
        chosen.append(free[crowds.index(min(crowds))])
    return sorted(chosen)


@pytest.mark.parametrize(("among", "size"), [(2, 6), (3, 6), (3, 2), (100, 9)])
def test_the_rarest_labels_are_those_of_a_plain_loop(among: int, size: int) -> None:
    data = toy_data(examples=300, classes=3)
    order = torch.argsort(data.train_y, stable=True)
    sizes = np.random.default_rng(5).integers(1, 40, 400).cumsum()  # most hold one label, some two
    parts = np.split(order.numpy(), sizes[sizes < 300])
    where, algorithm = fedge.Federation(data, parts), fedavg()
    held = [set(data.train_y[where.examples(client)].tolist()) for client in range(where.clients)]
    assert {len(some) for some in held} == {1, 2}
    draw = Clock(Simulator(algorithm, where), where, SLOW, choice=Choice("labels", among)).choosing(where.clients, size)
    for number in range(1, 21):
        key, many = fold(SEED, COHORT, number, 0), min(where.clients, among * size)
        candidates = choose(key, where.clients, many).tolist()
        lot = uniform(fold(SEED, TIES, number, 0), np.array(candidates)).tolist()
        mixed = [client for _, client in sorted(zip(lot, candidates, strict=True))]
        assert draw(At(SEED, number, 0)).tolist() == plain_rarest(held, mixed, size)


def test_of_equal_clients_nobody_is_preferred() -> None:
    """A client's number is no merit: in many cohorts of 4 of 12, all are late about as often, and chosen as often."""
    where, algorithm = fedge.Federation(toy_data(60), [range(5 * k, 5 * k + 5) for k in range(12)]), fedavg()
    link = Clock(Simulator(algorithm, where), where, Profiles("phone"), FirstOf(2))
    run = fedge.train(algorithm, where, rounds=240, cohort=4, link=link)
    late = Counter(client for record in run.history for client in record["late"])
    assert 20 <= min(late[k] for k in range(12)) <= max(late.values()) <= 60, "40 each on average"
    for by in ("speed", "labels"):
        draw = Clock(Simulator(algorithm, where), where, Profiles("phone"), choice=Choice(by)).choosing(12, 4)
        taken = Counter(client for number in range(240) for client in draw(At(0, number, 0)).tolist())
        assert 55 <= min(taken[k] for k in range(12)) <= max(taken.values()) <= 105, "80 each on average"


def test_the_fastest_are_those_who_answer_first(tmp_path: Path) -> None:
    """With latency, several epochs and several models per client, as the clock has them."""
    algorithm = fedge.FedOVA(fedge.FedAvg(toy_model(outputs=2), epochs=3, batch_size=5), classes=3)
    lists = [range(60), range(0, 15, 3), range(5, 12), range(30), range(30, 34), range(40, 55)]
    where = fedge.Federation(toy_data(60), lists)
    latency, flops = (0.0, 3.0, 0.0, 0.1, 2.0, 0.3), (1e6, 1e8, 3e5, 1e7, 1e6, 2e5)
    rows = [(flops[k], 1e6, 2e4, 1, 1, 1, 1e9, latency[k]) for k in range(6)]
    fleet = Table(device_file(tmp_path / "six.csv", rows), 6)
    whole = fedge.train(algorithm, where, rounds=1, link=Clock(Simulator(algorithm, where), where, fleet))
    seconds = {row[0]: sum(row[1:5]) for row in whole.history[0]["timeline"][0]["clients"]}
    for size in range(1, 6):
        draw = Clock(Simulator(algorithm, where), where, fleet, choice=Choice("speed", 6)).choosing(6, size)
        assert set(draw(At(0, 1, 0)).tolist()) == set(sorted(seconds, key=lambda k: seconds[k])[:size])


def test_accuracy_by_kind_of_device() -> None:
    where = federation()
    found = by_kind(where, SLOW)
    assert sum(found["clients"]) == 7
    counts, kind = where.label_counts().numpy(), SLOW.devices(np.arange(7)).kind
    classes = [0.5, 1.0, 0.25]
    told = accuracy_by_kind(found, classes)
    for at, name in enumerate(SLOW.kinds):
        own = counts[kind == at].sum(0)
        assert told[name] == pytest.approx((own * classes).sum() / own.sum())
    thirds = by_kind(where, Profiles("phone", spread=5.0))
    assert thirds["kinds"] == ["slow third", "middle third", "fast third"]
    assert by_kind(where, Profiles("phone")) == {}


def test_devices_with_too_little_memory_are_counted() -> None:
    run = trained(fedavg(), fleet=Profiles("microcontroller"), rounds=1)
    assert "short_of_memory" not in run.history[0]
    big = fedge.FedAvg(fedge.models.mlp(6, (20_000,), 3).double(), epochs=1)
    assert trained(big, fleet=Profiles("microcontroller"), rounds=1).history[0]["short_of_memory"] == 5


def test_the_memory_that_is_needed_is_of_what_comes_and_what_goes() -> None:
    """What is sent to a client and its upload: twice the model, for FedAvg."""
    algorithm = fedavg()
    model = sum(one.nbytes for one in algorithm.model.parameters())
    flow = algorithm.round(algorithm.init({name: leaf.detach() for name, leaf in algorithm.model.named_parameters()}))
    work = Workload(algorithm, federation()).of(next(flow), np.arange(3))
    assert work.memory.tolist() == [2 * model] * 3


# Experiments

TOML = """
[data]
name = "digits"

[partition]
kind = "labels_per_client"
clients = 20

[model]
name = "logistic"

[train]
rounds = 4
cohort = 6
checkpoint_every = 2

[algorithm]
name = "fedavg"
epochs = 1
"""


def experiment(*lines: str) -> Experiment:
    return parse(tomllib.loads(TOML + "\n".join(["[edge]", *lines])))


def test_an_experiment_has_devices_and_resumes(tmp_path: Path) -> None:
    chosen = experiment('profile = ["phone", "laptop"]', "spread = 5", 'policy = {name = "first_of", count = 4}')
    assert parse(chosen.table()).edge == chosen.edge
    (whole,) = compare(chosen, tmp_path / "a")
    half = parse({**chosen.table(), "train": {**chosen.train, "rounds": 2}})
    compare(half, tmp_path / "b")
    (again,) = compare(chosen, tmp_path / "b", resume=True)
    assert close(whole.run.params, again.run.params) == 0
    drop = [{k: v for k, v in r.items() if k != "seconds"} for run in (whole.run, again.run) for r in run.history]
    assert drop[:4] == drop[4:]
    assert all(len(record["late"]) == 2 for record in whole.run.history)
    other = experiment('profile = ["phone", "laptop"]', "spread = 6", 'policy = {name = "first_of", count = 4}')
    with pytest.raises(RunFolderError, match=r"edge\.spread = 5.*now it is 6"):
        compare(other, tmp_path / "b", resume=True)


def test_settings_make_the_table(tmp_path: Path) -> None:
    assert load(None, ["edge.profile=phone"]).edge["profile"] == "phone"
    found = load(None, ["edge.cell={name = 'cell', bandwidth = 1e6}", "edge.stay=3.5"]).edge
    assert (found["cell"]["bandwidth"], found["stay"]) == (1e6, 3.5)
    assert load().edge is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('profile = "phones"', "edge: profile is 'phones'"),
        ('profile = "fone"', r"""'fone' \(did you mean 'phone'\?\), .* or a list such as \["phone", "laptop"\]"""),
        ('profile = ["phone", "labtop"]', r"is \['phone', 'labtop'\] \(did you mean 'laptop'\?\)"),
        ("spred = 2", r"edge: unknown key 'spred' \(did you mean 'spread'\?\)"),
        ('policy = {name = "dedline"}', r"policy.name is 'dedline' \(did you mean 'deadline'\?\)"),
        (
            'policy = {name = "deadline"}',
            r'edge: policy: seconds is missing, expected a number, as in \{name = "deadline", seconds = 60\}',
        ),
        (
            'policy = {name = "first_of"}',
            r'policy: count is missing, expected a whole number, as in \{name = "first_of", count = 10\}',
        ),
        ('policy = {name = "partial_work"}', r'as in \{name = "partial_work", seconds = 60\}'),
        ("spread = 0.5", "edge: spread is 0.5, it must be at least 1"),
        ('file = "nowhere.csv"', "edge: cannot read the devices in nowhere.csv"),
        ('file = "a.csv"\ncell = {name = "cell"}', "edge: there are a cell and a file"),
        ('file = "a.csv"\nprofile = "laptop"', "edge: profile is 'laptop', but devices come from a file: leave one"),
        ('cell = {name = "cell"}\nspread = 2', "edge: spread is 2, but devices come from a cell: leave one of them"),
        ("correlation = 0.5", "edge: correlation is 0.5, but spread is 1, so that all devices of a kind are alike"),
        ('policy = {name = "first_of", count = 7}', "edge: policy: count is 7, but 6 clients are asked in a round"),
    ],
)
def test_bad_tables_are_refused(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=message):
        compare(experiment(line), tmp_path / "a")


def test_chosen_cohorts_that_are_drawn_one_by_one_are_refused_before_any_run(tmp_path: Path) -> None:
    chosen = experiment('choose = "speed"')
    table = {**chosen.table(), "train": {**chosen.train, "sampling": "poisson"}}
    with pytest.raises(ExperimentError, match=r"edge: choose is 'speed', .* but sampling in \[train\] is 'poisson'"):
        compare(parse(table), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_real_fleet_refuses_devices(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"edge: a real fleet has devices and a time of its own"):
        compare(experiment(), tmp_path / "a", link=lambda label: None)
