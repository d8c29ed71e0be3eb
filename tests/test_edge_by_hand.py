"""What plain loops do not reach: all kinds of task, set-up, who left and who was late, cells, kinds of device, fields.

Each number is computed again by hand, or from the tables of the page.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import astuple, replace
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
    accuracy_by_kind,
    by_kind,
)
from fedge.edge.draws import exponential
from fedge.edge.fit import fit, read
from fedge.edge.profiles import NETWORKS, PROFILES
from fedge.edge.settings import Edge
from fedge.edge.work import Counted, Workload
from fedge.engine import Simulator
from fedge.engine.clients.run_task import one_step
from fedge.experiment import flops_of, parse
from fedge.keys import LEAVING, fold
from tests.cases import algorithms, close, toy_data
from tests.test_edge import SLOW, TOML, device_file, fedavg, federation, trained
from tests.test_edge_fit import logged

PAGE = Path(__file__).parents[1] / "docs/edge.md"


# Work


def first_ask(algorithm: fedge.Algorithm, load: Workload) -> fedge.Ask:
    found = next(algorithm.round(algorithm.init(load.params)))
    return found[0] if isinstance(found, tuple) else found


COUNTED = ("fedavg", "spectral", "foof", "lbfgs", "lbfgs_product", "giant", "fedova_foof")


@pytest.mark.parametrize("name", COUNTED)
def test_flops_of_a_step_are_those_of_its_examples(name: str) -> None:
    """Every task with two, five and nine examples, against a count of that very step; trials of a model are none."""
    algorithm, where = algorithms()[name], federation()
    load = Workload(algorithm, where)
    ask = first_ask(algorithm, load)
    load.of(ask, np.arange(7))
    tasks = [load.tasks[task] for task in ask.tasks]
    rows = tasks[0].rows is not None
    sent = {part: {key: leaf[0] if rows else leaf for key, leaf in own.items()} for part, own in ask.send.items()}
    for task, cost in zip(tasks, load._costs[load._kind(ask)], strict=True):
        known = sent if task.first is None else {**sent, **task.first(sent)}
        step, carry = one_step(task), task.start(known)
        with torch.no_grad():
            step(known, carry, load._batch(2), torch.tensor(0))
            for examples in (2, 5, 9):
                with Counted() as counted:
                    step(known, carry, load._batch(examples), torch.tensor(0))
                assert counted.total == cost.step + examples * cost.example > 0
        sent = sent | cost.keeps


def test_rows_that_are_not_asked_for_are_no_work() -> None:
    where, algorithm = federation(), algorithms()["fedova_fedavg"]
    load = Workload(algorithm, where)
    ask = first_ask(algorithm, load)
    sent = {part: {name: leaf[[0, 2]] for name, leaf in own.items()} for part, own in ask.send.items()}
    some = load.of(replace(ask, rows=(0, 2), send=sent), np.arange(7))
    held = [set(where.data.train_y[where.examples(k)].tolist()) for k in range(7)]
    assert some.jobs.tolist() == [len(labels & {0, 2}) for labels in held]
    assert some.jobs.tolist() != load.of(ask, np.arange(7)).jobs.tolist()


DIFFERENT = [
    (name, *rest)
    for name in ("fedova_subspace", "fedova_lbfgs_slopes", "fedova_lbfgs_product_next")
    for rest in ((None, 2, 1), (FirstOf(2), 3, 3))
]
DIFFERENT.append(("fedova_lbfgs_product_next", FirstOf(2), 3, 1))  # one who is late has nothing to do with one ask


@pytest.mark.parametrize(("name", "policy", "cohort", "seed"), DIFFERENT)
def test_classes_that_are_asked_different_things(name: str, policy: FirstOf | None, cohort: int, seed: int) -> None:
    """A class whose holders were not drawn yet has no pair or direction: a phase has several asks, of other shapes."""
    algorithm, where, many = algorithms()[name], federation(), list[int]()

    class Compared(Clock):
        def ask(self, at, asks, clients):
            before = len(self.ledger)
            replies = super().ask(at, asks, clients)
            many.append(len(asks))
            for ask, row in zip(asks, self.ledger.rows[before:], strict=True):
                work = self.load.of(ask, clients.numpy())
                assert row.clients == int((work.jobs > 0).sum())
                if policy is None:
                    assert (row.down, row.up) == (work.down.sum(), work.up.sum())
            return replies

    link = Compared(Simulator(algorithm, where), where, SLOW, policy)
    timed = fedge.train(algorithm, where, rounds=4, cohort=cohort, seed=seed, link=link)
    if policy is None:
        plain = fedge.train(algorithm, where, rounds=4, cohort=cohort, seed=seed)
        assert close(plain.params, timed.params) == 0
    assert max(many) == 2


def test_a_fisher_diagonal_costs_every_example_a_backward_pass() -> None:
    """6-5-3: forwards and gradients 2 * 105, and 2 * 30 for the squares of the first layer's inputs."""
    algorithm, where = algorithms()["lbfgs"], federation()
    load = Workload(algorithm, where)
    work = load.of(first_ask(algorithm, load), np.arange(7))
    n = load.sizes(np.arange(7))
    assert work.flops.tolist() == (algorithm.epochs * n * 210 + n * 270).tolist()


def test_shared_examples_are_received_and_learned_from(tmp_path: Path) -> None:
    """Joules and seconds of set-up by hand, and FLOPs of rounds over a client's own examples and the shared ones."""
    where, rows = federation(), [(1e6 * (k + 1), 1e4, 1e4, 7.0, 0.5 + k, 3.0, 1e9, 0.0) for k in range(7)]
    algorithm = fedge.DataSharing(fedavg(), beta=0.3)
    link = Clock(Simulator(algorithm, where), where, Table(device_file(tmp_path / "d.csv", rows), 7))
    first, second = fedge.train(algorithm, where, rounds=2, seed=3, link=link).history
    shared = link.load.shared
    seconds = 8 * shared * (6 * 8 + 8) / 1e4  # six inputs and a label
    assert shared > 0
    assert first["virtual_seconds"] - second["virtual_seconds"] == pytest.approx(seconds)
    assert first["joules"] - second["joules"] == pytest.approx(sum(0.5 + k for k in range(7)) * seconds)
    for client, _, _, computing, *_ in first["timeline"][0]["clients"]:
        own = len(where.examples(client)) + shared
        assert computing == pytest.approx(2 * own * 210 / (1e6 * (client + 1)))


def test_partial_work_of_binary_models_takes_its_share_of_all_of_them() -> None:
    """A client of FedOVA does the same number of steps for each class it holds, and as many FLOPs."""
    where, algorithm = federation(), algorithms()["fedova_fedavg"]
    limits = dict[int, tuple[int, ...]]()

    class Seen(Clock):
        def _carry(self, at, asks, phase, end):
            limits.update(asks[0].limits)
            return super()._carry(at, asks, phase, end)

    link = Seen(Simulator(algorithm, where), where, SLOW, PartialWork(0.0704))
    (phase,) = fedge.train(algorithm, where, rounds=1, seed=3, link=link).history[0]["timeline"]
    flops, batch = SLOW.devices(np.arange(7)).flops, algorithm.inner.batch_size
    for client, _, _, computing, *_ in phase["clients"]:
        labels, n = where.data.train_y[where.examples(client)], len(where.examples(client))
        a_pass = -(-n // batch)
        (steps,) = limits[client]
        visits = steps // a_pass * n + min(steps % a_pass * batch, n)
        assert computing == pytest.approx(len(labels.unique()) * visits * 180 / flops[client])
    assert len(set(limits.values())) > 1


@pytest.mark.parametrize("share", [0.04, 0.1, 0.3, 0.45, 0.5, 0.7, 0.97, 1.0])
def test_partial_work_does_as_many_steps_as_a_plain_count(share: float) -> None:
    """Batch by batch, where the last of an epoch is smaller: the next step would be over the time, none of these is."""
    data, sizes = toy_data(examples=90), (5, 13, 24, 21, 27)  # of share 0.04 one client alone can do a step
    where = fedge.Federation(data, np.split(np.arange(90), np.cumsum(sizes)[:-1]))
    algorithm, flops = fedavg(epochs=5, batch_size=10), PROFILES["microcontroller"].flops
    limits = dict[int, tuple[int, ...]]()

    class Seen(Clock):
        def _carry(self, at, asks, phase, end):
            limits.update(asks[0].limits or {})
            return super()._carry(at, asks, phase, end)

    def rows(policy: PartialWork | None = None) -> list[list[float]]:
        link = Seen(Simulator(algorithm, where), where, Profiles("microcontroller", "wifi"), policy)
        return fedge.train(algorithm, where, rounds=1, seed=3, link=link).history[0]["timeline"][0]["clients"]

    *_, (_, latency, down, longest, up, _) = rows()
    room = share * longest * (1 + 1e-12)
    cut = rows(PartialWork(latency + down + share * longest + up))
    for client, _, _, computing, *_ in cut:
        batches = [min(10, sizes[client] - first) for first in range(0, sizes[client], 10)] * 5
        steps = max(1, sum(spent <= room for spent in np.cumsum(batches) * 210 / flops))
        assert limits.get(client, (len(batches),)) == (steps,)
        assert computing == pytest.approx(sum(batches[:steps]) * 210 / flops)


def test_partial_work_of_several_tasks_takes_the_same_share_of_each() -> None:
    """What a task does once counts too: of each, as many steps as fit into its share, one after another."""
    where, algorithm = federation(), algorithms()["lbfgs"]
    load, clients = Workload(algorithm, where), np.arange(7)
    ask = first_ask(algorithm, load)
    work = load.of(ask, clients)
    costs, n = load._costs[load._kind(ask)], load.sizes(clients)
    costs[:] = [cost._replace(once=cost.once + 777.0, step=cost.step + 50.0) for cost in costs]
    assert len(work.steps) == 2
    for share in (0.01, 0.37, 0.5, 0.83, 1.0):
        found, spent = load.fitting(ask, clients, work.steps, np.full(7, share))
        told = np.zeros(7)
        for at, (name, cost) in enumerate(zip(ask.tasks, costs, strict=True)):
            for k in range(7):
                size = min(load.tasks[name].batch_size or n[k], n[k])
                batches = [min(size, n[k] - first) for first in range(0, n[k], size)] * 99
                flops = cost.once + np.cumsum([cost.step + cost.example * b for b in batches[: work.steps[at, k]]])
                assert found[at, k] == max(1, (flops <= share * flops[-1] * (1 + 1e-12)).sum())
                told[k] += flops[found[at, k] - 1]
        assert spent.tolist() == pytest.approx(told.tolist())


def test_what_a_client_makes_in_several_tasks_is_in_its_memory_together() -> None:
    """The weights (424 bytes), the update and the Fisher diagonal, which are sent in one answer."""
    algorithm = algorithms()["lbfgs"]
    load = Workload(algorithm, federation())
    work = load.of(first_ask(algorithm, load), np.arange(2))
    assert work.memory.tolist() == [3 * 424] * 2
    assert work.up.tolist() == [2 * (424 + 4)] * 2


def test_memory_is_that_of_the_largest_phase(tmp_path: Path) -> None:
    """GIANT's last phase needs half of what the others do."""
    rows = [(1e6, 1e6, 1e6, 0.0, 0.0, 0.0, 600.0, 0.0)] * 7
    record = trained(algorithms()["giant"], fleet=Table(device_file(tmp_path / "d.csv", rows), 7), rounds=1).history[0]
    assert record["short_of_memory"] == 5


# Who left, who was late, and who is shown


def test_who_would_have_left_after_the_deadline_was_late() -> None:
    """All need the same seconds: who leaves before the deadline has left, and everybody else is late."""
    data, clients = toy_data(examples=400), 400
    where, algorithm = fedge.Federation(data, np.arange(400)[:, None]), fedavg()
    fleet = Profiles("phone")
    probe = fedge.train(algorithm, where, rounds=1, seed=3, link=Clock(Simulator(algorithm, where), where, fleet))
    seconds = probe.history[0]["virtual_seconds"]
    left = seconds * exponential(fold(3, LEAVING, 1, 0), np.arange(clients))
    link = Clock(Simulator(algorithm, where), where, fleet, Deadline(0.9 * seconds), stay=seconds)
    with pytest.raises(fedge.engine.TooFewReplies):
        fedge.train(algorithm, where, rounds=1, seed=3, link=link)
    assert link.notes()["late"] == np.flatnonzero(left > 0.9 * seconds).tolist()


def test_a_time_line_shows_the_slowest_sixty() -> None:
    data = toy_data(examples=80)
    where, algorithm = fedge.Federation(data, np.arange(80)[:, None]), fedavg()
    fleet = Profiles("phone", spread=30.0)
    link = Clock(Simulator(algorithm, where), where, fleet)
    (phase,) = fedge.train(algorithm, where, rounds=1, link=link).history[0]["timeline"]
    d = fleet.devices(np.arange(80))
    taken = 8 * 424 / d.down + 2 * 210 / d.flops + 8 * 428 / d.up
    assert [row[0] for row in phase["clients"]] == sorted(taken.argsort()[20:].tolist())


def test_a_time_line_ends_where_the_phase_does() -> None:
    """A client that leaves while it wakes up has no bar after that."""
    (phase,) = trained(fedavg(), rounds=1, stay=0.1).history[0]["timeline"]
    short = [sum(row[1:5]) for row in phase["clients"] if not row[5]]
    assert min(short) < 0.07
    left = 0.1 * exponential(fold(3, LEAVING, 1, 0), np.array([row[0] for row in phase["clients"] if not row[5]]))
    assert short == pytest.approx(left)


# Cells


def test_what_is_drawn_of_a_client_of_a_cell_has_nothing_to_do_with_the_rest() -> None:
    cell, clients = Cell(slowest=1e9, fastest=3e9), np.arange(20_000)
    place, clock = cell.distance(clients), cell.devices(clients).flops
    shadow = np.log10(cell.gain(clients) / replace(cell, shadowing=0.0).gain(clients))
    assert np.abs(np.corrcoef([place, clock, shadow]) - np.eye(3)).max() < 0.03


def test_devices_of_a_cell_have_the_rates_of_a_client_alone() -> None:
    """By these cohorts are chosen, and `fedge edge show` draws them."""
    cell = Cell(seed=3)
    devices = cell.devices(np.arange(5))
    for client in range(5):
        alone = replace(cell, fading=False).rates(At(0, 1, 0), np.array([client]), devices)
        assert [float(one[0]) for one in alone] == pytest.approx([devices.down[client], devices.up[client]])


# Kinds


def test_thirds_are_by_speed() -> None:
    where, fleet = federation(), Profiles("phone", spread=5.0)
    found, order = by_kind(where, fleet), fleet.devices(np.arange(7)).flops.argsort()
    counts = where.label_counts().numpy()
    assert found["clients"] == [3, 2, 2]
    assert found["labels"] == [counts[part].sum(0).tolist() for part in (order[:3], order[3:5], order[5:])]


def test_classes_without_test_examples_do_not_count_for_a_kind() -> None:
    found = {"kinds": ["old", "new"], "labels": [[10, 30, 5], [0, 0, 5]]}
    assert accuracy_by_kind(found, [0.5, 0.9, None]) == {"old": pytest.approx((10 * 0.5 + 30 * 0.9) / 40), "new": None}


# Fields and tables


def test_every_field_of_the_table_arrives(tmp_path: Path) -> None:
    where, link = federation(), Simulator(fedavg(), federation())
    edge = Edge("laptop", "lora", 3.0, 0.5, 0.7, 9, policy=Deadline(5.0), stay=4.0, choose="labels", among=5)
    assert edge.fleet(7) == Profiles("laptop", "lora", 3.0, 0.5, 0.7, 9)
    clock = edge.clock(link, where)
    assert (clock.fleet, clock.policy, clock.stay, clock.choice) == (
        edge.fleet(7), Deadline(5.0), 4.0, Choice("labels", 5),
    )  # fmt: skip
    file = device_file(tmp_path / "d.csv", [(1e9, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0)])
    assert Edge(file=file, seed=9).fleet(7) == Table(file, 7, 9)
    assert Edge(cell=Cell(seed=2)).fleet(7) == Cell(seed=2)


UNITS = {"kB": 1e3, "GB": 1e9, "kbit/s": 1e3, "Mbit/s": 1e6, "s": 1.0, "": 1.0}


def shown(cell: str) -> float:
    number, unit = re.fullmatch(r"([\d.e]+)\s?([A-Za-z/]*)", cell.strip("*†")).groups()
    return float(number) * UNITS[unit]


def rows_of(names: tuple[str, ...]) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1:] for cells in lines if cells[0].strip("`") in names}


def test_profiles_are_those_of_the_page() -> None:
    for name, (flops, watts, memory, network, *_) in rows_of(tuple(PROFILES)).items():
        told = (*map(shown, (flops, watts, memory)), network.strip("`"))
        assert told == astuple(PROFILES[name])
    assert rows_of(tuple(PROFILES)).keys() == PROFILES.keys()


def test_networks_are_those_of_the_page() -> None:
    found = rows_of(tuple(NETWORKS))
    assert found.keys() == NETWORKS.keys()
    for name, cells in found.items():
        assert astuple(NETWORKS[name]) == pytest.approx(tuple(map(shown, cells[:5])), rel=0.02)


def test_a_seed_draws_the_devices_it_always_drew() -> None:
    """Stored results name a seed, not its devices."""
    who = np.array([0, 5, 999_999])
    devices = Profiles(("phone", "laptop"), spread=10.0, correlation=0.5, seed=1).devices(who)
    assert devices.kind.tolist() == [1, 1, 0]
    assert devices.flops == pytest.approx([60733632096.675, 44099375508.2003, 15824350196.8064])
    assert devices.up == pytest.approx([28494689.1168726, 38135105.1443728, 7311720.30279383])
    cell = Cell(slowest=1e9, fastest=3e9, seed=1)
    devices = cell.devices(who)
    assert cell.distance(who) == pytest.approx([184.127179401730, 231.033472580413, 193.348839852337])
    assert devices.flops == pytest.approx([10839637375.006, 9277788572.48152, 4917267842.48932])
    assert cell.rates(At(1, 2, 0), who, devices)[1] == pytest.approx([44703450.775429, 51864616.513394, 5391164.490151])


# Fitting


TWICE = {(r, p): {k: float((k + 1 + r + 3 * p) * 1e6) for k in range(4)} for r in range(1, 9) for p in range(2)}


def test_the_phases_of_a_round_are_added_up() -> None:
    records = logged(TWICE, [1e5], 1e-6)
    found = fit(read(records), TWICE)
    sums = {record["round"]: 0.0 for record in records}
    for record in records:
        sums[record["round"]] += record["phases"][0]["seconds"]
    assert found.measured == pytest.approx(list(sums.values()))
    assert found.predicted == pytest.approx(found.measured)
    assert found.ahead == pytest.approx(found.measured)


@pytest.mark.parametrize(
    ("rest", "latency", "per_byte"), [((0.1, 0.2, 0.9), 0.0, 3.2 / 14), ((3.0, 2.0, 1.0), 2.0, 0.0)]
)
def test_neither_latency_nor_the_time_of_a_byte_is_below_nothing(
    rest: tuple[float, ...], latency: float, per_byte: float
) -> None:
    """A line through 0.1, 0.2, 0.9 at 1, 2, 3 begins below zero: the one through the origin has the slope 3.2 / 14."""
    flops = {(r, 0): {0: 1e6} for r in (1, 2, 3)}
    phases = [
        {"round": r, "phase": 0, "seconds": 1.0 + rest[r - 1], "clients": [[0, 0.0, 1.0, r / 2, r / 2]]}
        for r in (1, 2, 3)
    ]
    found = fit(read({"round": one["round"], "phases": [one]} for one in phases), flops).devices
    assert found.latency.tolist() == pytest.approx([latency])
    assert 8 / found.down[0] == pytest.approx(per_byte, abs=1e-10)


def test_work_on_shared_examples_is_counted() -> None:
    table = tomllib.loads(TOML)
    alone = flops_of(parse(table))
    table["algorithm"] = {"name": "data_sharing", "beta": 0.5, "inner": table["algorithm"]}
    shared = flops_of(parse(table))
    more = {shared[at][k] - alone[at][k] for at in alone for k in alone[at]}
    assert len(more) == 1
    assert more.pop() > 0
