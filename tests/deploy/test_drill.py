"""The drill in short, and its judge: a fault may cost what it explains, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.drill import Drill, judge
from tests.deploy.plan import FULL, REASONS, SHORT, unexplained, unnamed

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


def test_every_fault_must_be_named() -> None:
    """An empty record names nothing; one wrong word, or one escape, is found."""
    records = {number: record(number) for number in range(1, FULL.rounds + 1)}
    named = [fault for _, _, fault in FULL.faults() if fault in REASONS]
    others = 1 + len(FULL.impostors) + len(FULL.link_rounds) + len(FULL.push_rounds) + 1
    assert len(unnamed(records, FULL)) == len(named) + others
    records[1] = record(1, (0, "\x1b[31m"))
    assert len(unnamed(records, FULL)) == len(named) + others + 1
