"""A node that lets a deadline pass costs that deadline once: it is released, named, and back when it is back."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import Error, Message
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode

import fedge
from fedge.deploy import client_app
from fedge.deploy.envelope import unpack
from fedge.deploy.outage import Outages
from tests.deploy.test_link import ALGORITHM, CLIENTS, FEDERATION, Yard, link_to, load, more, rounds_of

NODE, CLIENT = 103, 3


def works(yard: Yard, node: int) -> int:
    """How often a node was sent work."""
    return sum(m.metadata.dst_node_id == node and "at" in unpack(m.content)[0] for m in yard.sent)


def test_a_silent_node_is_waited_for_once_and_named() -> None:
    said: list[str] = []
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM, said, deadline=4.0)
    yard.faults[NODE] = lambda reply: None
    run = more(link, rounds=5)
    assert [record["seconds"] > 4 for record in run.history] == [True, True, False, False, False], "work and greeting"
    assert works(yard, NODE) == 1
    dropped = [drop for (drop,) in rounds_of(run)]
    assert {drop["client"] for drop in dropped} == {CLIENT}
    assert dropped[0]["reason"] == "no answer within 4 s"
    assert all("103" in drop["reason"] for drop in dropped[1:])
    assert said[-2] == "node 103 is left out: no answer within 4 s in round 1; it is asked again who it is"
    assert said[-1] == "node 103 did not say who it is: no answer within 4 s"


def test_a_silent_node_is_back_when_it_answers() -> None:
    said: list[str] = []
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM, said, deadline=0.5)
    yard.faults[NODE] = lambda reply: None
    run = more(link, rounds=2)
    del yard.faults[NODE]
    time.sleep(0.6)
    run = more(link, run, rounds=3)
    assert rounds_of(run)[-1] == []
    assert said[-1] == "node 103 takes part again, as client 3"


def test_a_node_that_was_slow_once_takes_part_in_the_next_round() -> None:
    """Its app died once: it is asked who it is, answers, and is used again at once."""
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM, deadline=0.5)
    yard.faults[NODE] = lambda reply: yard.faults.pop(NODE) and None
    run = more(link, rounds=2)
    assert [len(dropped) for dropped in rounds_of(run)] == [1, 0]


def test_a_node_that_is_silent_time_and_again_is_left_alone_for_longer_and_longer() -> None:
    """It says who it is and never does its work: as a device without enough memory."""
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM, deadline=0.5)
    silent = [True]
    yard.faults[NODE] = lambda reply: None if silent[0] and "seconds" in unpack(reply.content)[0] else reply
    run = more(link, rounds=20)
    reasons = [drop["reason"] for dropped in rounds_of(run) for drop in dropped if drop["client"] == CLIENT]
    assert len(reasons) == 20, "others may be late once on a busy machine; this one never answers"
    asked = [number for number, reason in enumerate(reasons, 1) if reason == "no answer within 0.5 s"]
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert asked[:2] == [1, 2], "once is nothing"
    assert all(2**k <= gap <= 2**k + 1 for k, gap in enumerate(gaps))  # a greeting may be heard a round later
    assert len(asked) >= 4
    assert reasons[2].endswith("in round 2; silent 2 times, it is asked again after 1 round")
    silent[0] = False
    run = more(link, run, rounds=18)
    assert rounds_of(run)[-1] == []


@pytest.mark.parametrize("leaves", [False, True], ids=["answers", "leaves"])
def test_a_node_that_is_silent_in_every_second_round_is_left_alone_as_well(leaves: bool) -> None:
    """It does its work in between, or leaves for a moment: what it can cost is a few deadlines, not half of them."""
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM, deadline=0.5)
    turn, real, looks = itertools.count(), yard.get_node_ids, itertools.count()

    def fault(reply: Message) -> Message | None:
        if "seconds" not in unpack(reply.content)[0]:
            return reply
        return None if leaves or next(turn) % 2 == 0 else reply

    yard.faults[NODE] = fault
    if leaves:
        yard.get_node_ids = lambda: [one for one in real() if one != NODE or next(looks) % 2]  # type: ignore[method-assign]
    run = more(link, rounds=24)
    lost = [drop["reason"] for dropped in rounds_of(run) for drop in dropped if drop["client"] == CLIENT]
    assert 1 <= lost.count("no answer within 0.5 s") <= (7 if leaves else 5)


def test_an_app_that_died_is_taken_for_silence() -> None:
    yard = Yard(client_app(ALGORITHM, load))
    said: list[str] = []
    link = link_to(yard, ALGORITHM, said, deadline=60.0)

    def crashed(reply: Message) -> Message:
        yard.faults.pop(NODE)
        return make_message(reply.metadata, error=Error(ErrorCode.CLIENT_APP_CRASHED, "ClientApp stopped responding."))

    yard.faults[NODE] = crashed
    run = more(link, rounds=2)
    assert [len(dropped) for dropped in rounds_of(run)] == [1, 0]
    assert said[-1] == f"node {NODE} takes part again, as client {CLIENT}"


def test_when_nobody_answered_the_next_round_waits_for_them() -> None:
    """As after an outage: every answer is lost, and no node is to blame."""
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM, deadline=1.0, min_replies=1)
    lost = [True]

    def work_only(reply: Message) -> Message | None:
        return None if lost[0] and "seconds" in unpack(reply.content)[0] else reply

    for node in range(101, 100 + CLIENTS):
        yard.faults[node] = work_only
    first = more(link)
    assert len(rounds_of(first)[0]) == CLIENTS - 1
    lost[0] = False
    second = more(link, first)
    assert rounds_of(second)[1] == []


def test_a_round_waits_for_as_many_as_it_needs() -> None:
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM, deadline=4.0, min_replies=CLIENTS)
    real, calls = yard.get_node_ids, iter(range(1000))
    yard.get_node_ids = lambda: [] if next(calls) < 2 else real()  # type: ignore[method-assign]
    assert rounds_of(more(link)) == [[]]


class Unsteady(Yard):
    """A SuperLink that was killed while it took messages refuses them, some times."""

    refusals = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        if self.refusals:
            self.refusals -= 1
            raise KeyError("the push session may have expired")
        return super().push_messages(messages)


def test_messages_are_handed_over_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedge.deploy.post.AGAIN", (0.0, 0.0))
    yard = Unsteady(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM)
    yard.refusals = 2
    run = more(link)
    assert rounds_of(run) == [[]]
    (first, second) = run.history[0]["faults"]
    assert first == second == "the messages had to be sent again: KeyError: 'the push session may have expired'"
    yard.refusals = 3
    with pytest.raises(KeyError, match="expired"):
        more(link, run)


def test_outages_are_heard_while_attached() -> None:
    outages = Outages()
    outages.attach()
    logging.getLogger("flwr").info("Connection successful after %.2f seconds and %s tries.", 3.25, 4)
    outages.detach()
    logging.getLogger("flwr").info("Connection successful after %.2f seconds and %s tries.", 9.0, 4)
    assert outages.take() == ["the SuperLink did not answer for 3.2 s"]
    assert outages.take() == []


def test_examples_that_are_not_taken_release_a_node_too() -> None:
    algorithm = fedge.DataSharing(fedge.FedAvg(ALGORITHM.model, epochs=1, batch_size=4), beta=0.3)
    yard: Any = Yard(client_app(algorithm, load))
    link = link_to(yard, algorithm, deadline=0.5)
    yard.faults[NODE] = lambda reply: None
    begin = time.monotonic()
    run = fedge.train(algorithm, FEDERATION, rounds=3, seed=0, link=link)
    assert time.monotonic() - begin < 5
    assert works(yard, NODE) == 0
    assert {drop["client"] for dropped in rounds_of(run) for drop in dropped} == {CLIENT}
