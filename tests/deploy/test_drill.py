"""The drill in short, and its judge: a fault may cost what it explains, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.drill import FULL, KILLED_NODE, SHORT, Drill, judge, unexplained

CLIENTS, PLANNED = FULL.clients, FULL.devices
NODE_ROUND, LINK_ROUND, SERVER_ROUND = FULL.node_round, FULL.link_round, FULL.server_round
LATE, GONE = "no answer within 40 s", "its node is not connected"


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
    """A poisoned answer, a server that is killed and resumed, a killed node: the model is the simulator's."""
    drill = Drill(tmp_path, SHORT)
    drill.perform()
    assert judge(drill) == []


def record(number: int, *drops: tuple[int, str]) -> dict[str, Any]:
    return {"round": number, "dropped": [{"client": c, "task": "solve", "reason": reason} for c, reason in drops]}


@pytest.mark.parametrize(
    "good",
    [
        record(1),
        record(NODE_ROUND, (KILLED_NODE, LATE), (KILLED_NODE, LATE)),
        record(3, (PLANNED[3][0], "is not finite"), (KILLED_NODE, GONE)),
        record(LINK_ROUND, *((client, LATE) for client in range(CLIENTS))),
        record(LINK_ROUND, (0, LATE), (0, "this node does not hold 'params' of round 9 any more: it was restarted")),
    ],
)
def test_what_a_fault_explains(good: dict[str, Any]) -> None:
    assert unexplained([good]) == []


@pytest.mark.parametrize(
    "bad",
    [
        record(1, (0, LATE)),
        record(3, (PLANNED[3][0] + 1, LATE)),
        record(7, (0, GONE)),
        record(8, (KILLED_NODE, GONE)),  # back since its own fault in round 7
        record(LINK_ROUND, (0, "is not finite")),
        record(SERVER_ROUND, (0, LATE)),
        record(SERVER_ROUND + 1, (0, LATE)),
    ],
)
def test_what_no_fault_explains(bad: dict[str, Any]) -> None:
    assert unexplained([record(2), bad]) == [(bad["round"], bad["dropped"][0])]


def test_a_killed_superlink_costs_a_client_one_answer() -> None:
    assert len(unexplained([record(LINK_ROUND, (0, LATE), (0, LATE), (1, LATE))])) == 1
