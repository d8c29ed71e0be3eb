"""The drill in short, and its judge: a fault may cost what it explains, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedge
from fedge.attacks.attack import KINDS
from fedge.deploy import FlowerLink, Roster
from tests.cases import close
from tests.deploy import faults
from tests.deploy.drill import Drill, judge, promised
from tests.deploy.plan import COUNTS, FULL, REASONS, SHORT, unexplained, unnamed
from tests.deploy.test_link import Yard

LATE, GONE = "no answer within 40 s", "its node is not connected"
NODE_ROUND, KILLED = FULL.node
(WORK,), PUSH = FULL.link_rounds, FULL.push_rounds[0]


@pytest.fixture
def environment() -> Iterator[None]:
    """As it was, at the end: a drill sets its own."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.deploy
@pytest.mark.usefixtures("environment")
def test_the_drill_in_short(tmp_path: Path) -> None:
    """Bombs, liars, an impostor, a dying app, a killed node, SuperLink and server: the model is the simulator's."""
    drill = Drill(tmp_path, SHORT)
    drill.perform()
    assert judge(drill) == []


def record(number: int, *drops: tuple[int, str], faults: tuple[str, ...] = ()) -> dict[str, Any]:
    dropped = [{"client": c, "task": "solve", "reason": reason} for c, reason in drops]
    return {"round": number, "dropped": dropped, "faults": list(faults)}


@pytest.mark.parametrize(
    "good",
    [
        record(1),
        record(NODE_ROUND, (KILLED, LATE), (KILLED, LATE)),
        record(3, (2, "is not finite"), (KILLED, GONE)),
        record(11, (2, "node 7 is left out: no answer within 40 s in round 10; it is asked again who it is")),
        record(9, (3, "node 7 is left out: it says that it is client 0, but its key is client 3's")),
        record(WORK, *((client, LATE) for client in range(FULL.clients))),
        record(WORK, (0, LATE), (0, "this node does not hold 'params' of round 9 any more: it was restarted")),
        record(PUSH, (0, LATE)),
    ],
)
def test_what_a_fault_explains(good: dict[str, Any]) -> None:
    assert unexplained([good]) == []


@pytest.mark.parametrize(
    "bad",
    [
        record(1, (0, LATE)),
        record(3, (5, LATE)),
        record(7, (0, GONE)),
        record(8, (KILLED, GONE)),  # back since its own fault in round 7
        record(11, (2, "is not finite")),  # away, not poisoned
        record(WORK, (0, "is not finite")),
        record(FULL.server_round, (0, LATE)),
        record(FULL.rounds, (2, GONE)),
        record(FULL.rounds, (3, GONE)),
    ],
)
def test_what_no_fault_explains(bad: dict[str, Any]) -> None:
    assert unexplained([record(2), bad]) == [(bad["round"], bad["dropped"][0])]


def test_a_killed_superlink_costs_a_client_one_answer() -> None:
    assert len(unexplained([record(WORK, (0, LATE), (0, LATE), (1, LATE))])) == 1


def test_the_full_drill_has_every_attack_that_a_device_can_make_alone() -> None:
    assert {fault for _, _, fault in FULL.faults()} >= set(COUNTS) == set(KINDS) - {"ascent"}


def test_every_fault_must_be_named() -> None:
    """An empty record names nothing; one wrong word, or one escape, is found."""
    records = {number: record(number) for number in range(1, FULL.rounds + 1)}
    named = [fault for _, _, fault in FULL.faults() if fault in REASONS]
    others = 1 + len(FULL.impostors) + len(FULL.link_rounds) + len(FULL.push_rounds) + 1
    assert len(unnamed(records, FULL)) == len(named) + others
    records[1] = record(1, (0, "\x1b[31m"))
    assert len(unnamed(records, FULL)) == len(named) + others + 1


@pytest.mark.usefixtures("environment")
def test_lies_are_the_same_on_a_fleet_and_in_the_judges_run(tmp_path: Path) -> None:
    """Every attack in one process: real messages to the drill's devices, and the loop-back link that judges them."""
    lies = {number: {c: f for c, f in some.items() if f in KINDS} for number, some in FULL.devices.items()}
    plan = replace(FULL, rounds=max(lies), devices=lies)
    Drill(tmp_path, plan)
    yard = Yard(faults.client(), range(plan.clients))
    roster = Roster(yard, plan.clients, [""])
    roster.wait(plan.clients, 0, 60)
    algorithm, federation = faults.algorithm(), faults.federation()
    link = FlowerLink(algorithm, federation, yard, roster, deadline=60.0)
    run = fedge.train(algorithm, federation, rounds=plan.rounds, seed=faults.SEED, link=link)
    assert [record["dropped"] for record in run.history] == [[]] * plan.rounds
    assert close(run.params, promised(plan, set()).params) == 0
    honest = fedge.train(algorithm, federation, rounds=plan.rounds, seed=faults.SEED)
    assert close(run.params, honest.params) > 0.01
