"""Asynchronous training on nodes that answer when they can, replayed from its record by a plain loop in float64."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

import fedge
from fedge.deploy import client_app
from fedge.deploy.envelope import pack, unpack
from fedge.engine import TooFewReplies
from tests.cases import close
from tests.deploy.test_link import CLIENTS, FEDERATION, Yard, edited, link_to, load, nan
from tests.test_asynchronous import ALGORITHMS, SEED, Plain, fedavg


def late(yard: Yard, seconds: float) -> Callable[[Message], Message | None]:
    """The work, not the greeting, takes so long."""

    def fault(reply: Message) -> Message | None:
        if "seconds" not in unpack(reply.content)[0]:
            return reply
        threading.Timer(seconds, yard.replies.__setitem__, (reply.metadata.reply_to_message_id, reply)).start()
        return None

    return fault


def fleet(algorithm: Any, seconds: dict[int, float] | None = None, **options: Any) -> tuple[Yard, Any]:
    """Nodes that take so long, by client, and the link to them."""
    yard = Yard(client_app(algorithm, load))
    for client, taken in (seconds or {}).items():
        yard.faults[100 + client] = late(yard, taken)
    return yard, link_to(yard, algorithm, **({"deadline": 20.0} | options))


def train(algorithm: Any, link: Any, rounds: int = 3, cohort: int = 4, **options: Any) -> fedge.Run:
    return fedge.train(algorithm, FEDERATION, rounds=rounds, cohort=cohort, seed=SEED, link=link, **options)


def replayed(algorithm: Any, run: fedge.Run) -> Plain:
    """The record's answers, one after another: who had which dispatch, and from which versions it started."""
    plain = Plain(algorithm, 0)
    known = [[params] for params in plain.models]  # by row and version
    for number, client, versions, _ in (answer for record in run.history for answer in record["answers"]):
        assert sorted(map(int, versions)) == plain.rows[client]
        for row, version in ((int(row), version) for row, version in versions.items()):
            start = known[row][version]
            end = plain.local(start, client, number, row)
            plain.buffers[row].append((start, end, version, len(plain.where.examples(client))))
            if len(plain.buffers[row]) == algorithm.buffer:
                plain.move(row)
                known[row].append(plain.models[row])
    return plain


def assert_same(run: fedge.Run, plain: Plain) -> None:
    for row, params in enumerate(plain.models):
        own = {n: leaf[row] for n, leaf in run.params.items()} if plain.ova else run.params
        assert close(own, params) < 1e-11
    assert run.state["events"]["versions"] == plain.versions
    assert sum(plain.versions) == sum(record["server_steps"] for record in run.history) > 2


UNEVEN = {0: 0.05, 1: 0.6, 2: 0.3, 3: 0.02, 5: 0.9, 6: 0.1}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_record_says_how_the_models_came_about(name: str) -> None:
    algorithm = ALGORITHMS[name]()
    _, link = fleet(algorithm, UNEVEN)
    run = train(algorithm, link)
    answers = [answer for record in run.history for answer in record["answers"]]
    assert [len(record["answers"]) for record in run.history] == [4, 4, 4]
    assert [answer[0] for answer in answers] != sorted(answer[0] for answer in answers), "nobody overtook anybody"
    assert all(not record["dropped"] for record in run.history)
    assert_same(run, replayed(algorithm, run))


def test_a_slow_node_does_not_hold_up_the_others() -> None:
    algorithm = fedge.FedBuff(fedavg(), buffer=2)
    _, link = fleet(algorithm, {4: 16.0})
    begin = time.monotonic()
    run = train(algorithm, link, rounds=4, cohort=CLIENTS)
    assert time.monotonic() - begin < 14
    assert all(client != 4 for record in run.history for _, client, *_ in record["answers"])
    assert sum(record["server_steps"] for record in run.history) == 4 * CLIENTS // 2


def test_an_old_answer_counts_from_the_version_it_started_from() -> None:
    algorithm = fedge.FedBuff(fedavg(), buffer=2)
    _, link = fleet(algorithm, {4: 1.0} | dict.fromkeys((0, 1, 2, 3, 5, 6), 0.3))
    run = train(algorithm, link, rounds=6, cohort=CLIENTS)
    ages = [versions["0"] for r in run.history for number, client, versions, _ in r["answers"] if client == 4]
    assert ages[0] == 0
    assert run.history[2]["staleness"] > 0
    assert_same(run, replayed(algorithm, run))


def with_a_part_more(answer: Any) -> Any:
    return {row: [({**one, "evil": {}}, weight) for one, weight in uploads] for row, uploads in answer.items()}


BAD: list[tuple[Callable[[Any], Any], str]] = [
    (nan, "is not finite"),
    (lambda answer: [1], "the answer is a list"),
    (with_a_part_more, "upload has the part 'evil' too many or too few"),  # else it waits in the buffer
]


@pytest.mark.parametrize(("fault", "reason"), BAD)
def test_a_bad_answer_costs_itself_and_is_named(fault: Callable[[Any], Any], reason: str) -> None:
    algorithm = fedge.FedBuff(fedavg(), buffer=2)
    yard, link = fleet(algorithm)
    yard.faults[102] = edited(fault)
    run = train(algorithm, link, rounds=3, cohort=CLIENTS)
    dropped = [drop for record in run.history for drop in record["dropped"]]
    assert {drop["client"] for drop in dropped} == {2}
    assert all(reason in drop["reason"] for drop in dropped)
    good = sum(len(record["answers"]) for record in run.history) - len(dropped)
    assert sum(record["server_steps"] for record in run.history) == good // 2


def test_a_huge_upload_is_compared_with_those_of_other_clients() -> None:
    def huge(answer: Any) -> Any:
        for leaf in answer[0][0][0]["delta"].values():
            leaf.fill_(1e30)
        return answer

    wide = fedge.FedAvg(fedge.models.mlp(6, (20,), 3, seed=0).double(), lr=0.2, batch_size=4)  # 64 numbers or more
    algorithm = fedge.FedBuff(wide, buffer=2)
    yard, link = fleet(algorithm)
    held: dict[str, Message] = {}

    def hold(reply: Message) -> Message | None:  # the work, until the end of the round
        if "seconds" not in unpack(reply.content)[0]:
            return reply
        held[reply.metadata.reply_to_message_id] = edited(huge)(reply)
        return None

    yard.faults[102] = hold
    run = train(algorithm, link, rounds=5, cohort=CLIENTS, on_round=lambda record: yard.replies.update(held))
    dropped = [drop for record in run.history for drop in record["dropped"]]
    assert dropped
    assert all(d["client"] == 2 and "over 1000 times the usual" in d["reason"] for d in dropped)
    assert max(float(leaf.abs().max()) for leaf in run.params.values()) < 100


def told(**changes: Any) -> Callable[[Message], Message]:
    """A node that answers work with this head alone, at once."""

    def fault(reply: Message) -> Message:
        head, _ = unpack(reply.content)
        if "seconds" in head:
            reply.content = pack({"client": head["client"], **changes})
        return reply

    return fault


@pytest.mark.parametrize("fault", [edited(nan), told(error="no")], ids=["nan", "error"])
def test_a_fast_node_without_a_good_answer_does_not_end_the_run(fault: Callable[[Message], Message]) -> None:
    """It may answer a hundred times while the others work: it costs one answer per round."""
    algorithm = fedge.FedBuff(fedavg(), buffer=2)
    yard, link = fleet(algorithm, dict.fromkeys((0, 1, 3, 4, 5, 6), 0.4))
    yard.faults[102] = fault
    run = train(algorithm, link, rounds=7, cohort=CLIENTS)
    assert not any("skipped" in record for record in run.history)
    assert [[drop["client"] for drop in record["dropped"]] for record in run.history] == [[2]] * 7
    assert all(len(record["answers"]) == CLIENTS for record in run.history)


def test_only_bad_nodes_are_skipped_rounds_at_once() -> None:
    algorithm = fedge.FedBuff(fedavg(), buffer=2)
    yard, link = fleet(algorithm)
    yard.faults |= dict.fromkeys(yard.contexts, told(error="no"))
    begin = time.monotonic()
    with pytest.raises(TooFewReplies, match=r"round 5: task 'train' has good uploads of 0 clients, 1 needed"):
        train(algorithm, link, rounds=9, cohort=CLIENTS)
    assert time.monotonic() - begin < 10


def test_a_fast_node_does_not_use_up_a_round_that_needs_several_clients() -> None:
    algorithm = fedge.FedBuff(fedavg(), buffer=2)
    _, link = fleet(algorithm, dict.fromkeys((0, 1, 3, 4, 5, 6), 0.5), min_replies=4)
    run = train(algorithm, link, rounds=6, cohort=5)
    assert not any("skipped" in record for record in run.history)
    assert all(len({client for _, client, *_ in record["answers"]}) >= 4 for record in run.history)
    assert_same(run, replayed(algorithm, run))


def test_rows_that_there_are_not_cost_their_node_alone() -> None:
    algorithm = fedge.FedBuff(fedge.FedOVA(fedavg(2), classes=3), buffer=2)
    yard = Yard(client_app(algorithm, load))

    def lie(reply: Message) -> Message:
        head, blobs = unpack(reply.content)
        reply.content = pack(head | ({"rows": {"": [99]}} if "rows" in head else {}), blobs)
        return reply

    yard.faults[102] = lie
    run = train(algorithm, link_to(yard, algorithm, deadline=20.0), rounds=2, cohort=CLIENTS)
    assert {client for record in run.history for _, client, *_ in record["answers"]} == {0, 1, 3, 4, 5, 6}


class Growing:
    """Answers at once, each time with numbers 900 times as large: most uploads are its own."""

    def __init__(self, first: float) -> None:
        self.size = first

    def __call__(self, answer: Any) -> Any:
        for leaf in answer[0][0][0]["delta"].values():
            leaf.fill_(self.size)
        self.size = min(900 * self.size, 1e300)
        return answer


@pytest.mark.parametrize("first", [1.0, 1e30])
def test_a_fast_node_does_not_say_what_is_usual(first: float) -> None:
    """Neither by being the first, nor by answering more often than all others together."""
    wide = fedge.FedAvg(fedge.models.mlp(6, (20,), 3, seed=0).double(), lr=0.2, batch_size=4)
    algorithm = fedge.FedBuff(wide, buffer=2)
    yard, link = fleet(algorithm, dict.fromkeys((0, 1, 3, 4, 5, 6), 0.3))
    yard.faults[102] = edited(Growing(first))
    run = train(algorithm, link, rounds=6, cohort=CLIENTS)
    dropped = [drop for record in run.history for drop in record["dropped"]]
    assert len(dropped) >= 4
    assert {drop["client"] for drop in dropped} == {2}
    assert max(float(leaf.abs().max()) for leaf in run.params.values()) < 1000


def test_a_node_that_dies_is_named_and_the_others_go_on() -> None:
    algorithm = fedge.FedBuff(fedge.FedOVA(fedavg(2), classes=3), buffer=2)
    yard, link = fleet(algorithm, dict.fromkeys((0, 1, 3, 4, 5, 6), 0.2), deadline=2.0)
    yard.faults[102] = lambda reply: None if "seconds" in unpack(reply.content)[0] else reply
    run = train(algorithm, link, rounds=14, cohort=CLIENTS)
    dropped = [drop for record in run.history for drop in record["dropped"]]
    assert {(drop["client"], drop["reason"]) for drop in dropped} == {(2, "no answer within 2 s")}
    assert len(run.history) == 14


def test_without_any_node_it_says_so() -> None:
    algorithm = fedge.FedBuff(fedavg(), buffer=2)
    yard, link = fleet(algorithm, deadline=0.5)
    for node in yard.contexts:
        yard.faults[node] = lambda reply: None
    with pytest.raises(TooFewReplies, match=r"good uploads of 0 clients, 1 needed|no node was there"):
        train(algorithm, link, rounds=1, cohort=3)


@pytest.mark.parametrize("gone", [(103,), (100, 101, 102, 103)], ids=["one", "all"])
def test_a_node_that_leaves_skips_rounds_until_it_is_back(gone: tuple[int, ...]) -> None:
    """As in synchronous training: a device that goes away does not end the run of all."""
    algorithm = fedge.FedBuff(fedavg(), buffer=2)
    yard, link = fleet(algorithm, deadline=1.0, min_replies=4)
    for node in (104, 105, 106):
        del yard.contexts[node]

    def come_and_go(record: Any) -> None:
        if record["round"] == 1:
            for node in gone:
                del yard.contexts[node]
        elif record["round"] == 3:
            for node in gone:
                yard.join(node - 100, node)

    run = train(algorithm, link, rounds=5, cohort=4, on_round=come_and_go)
    assert ["skipped" in record for record in run.history] == [False, True, True, False, False]
    named = [{drop["client"] for drop in record["dropped"]} for record in run.history]
    assert named[1] >= {node - 100 for node in gone}
    assert named[0] == named[3] == named[4] == set()
    assert {drop["reason"] for drop in run.history[1]["dropped"]} == {"its node is not connected"}


def test_who_is_under_way_in_a_round_that_does_not_count_is_sent_out_anew() -> None:
    """The state after it is the one before it: nobody may have started from a version that there never was."""
    algorithm = fedge.FedBuff(fedavg(), buffer=1)
    _, link = fleet(algorithm, {4: 0.5})
    run = train(algorithm, link, rounds=1, cohort=CLIENTS)
    link.advance(run.state, SEED, 2, CLIENTS)
    assert link._abroad is not None
    assert any(away.versions[0] > run.state["events"]["versions"][0] for away in link._abroad._away.values())
    link.notes()
    link.advance(run.state, SEED, 2, CLIENTS)  # again
    first = run.state["events"]["versions"][0]
    started = [versions["0"] for _, _, versions, _ in link.notes()["answers"]]
    assert all(version <= first + steps for steps, version in enumerate(started)), "before there was such a version"


def test_a_round_with_too_few_good_answers_leaves_nobody_under_way() -> None:
    """Client 2 fails in round 2, while client 4 is at work on a model that is taken back with the round.

    Its answer would count as one of the future, whose age is negative: then an update is subtracted, or infinite.
    """
    algorithm = fedge.FedBuff(fedavg(), buffer=1, staleness=1.0)
    yard, link = fleet(algorithm, min_replies=CLIENTS)
    works: Counter[int] = Counter()

    def fault(reply: Message) -> Message | None:
        node, name = reply.metadata.src_node_id, reply.metadata.reply_to_message_id
        works[node] += "seconds" in unpack(reply.content)[0]
        pause = {(102, 2): 0.6, (104, 3): 1.5}.get((node, works[node]))
        if pause is None:
            return reply
        kept = told(error="no")(reply) if node == 102 else reply
        threading.Timer(pause, yard.replies.__setitem__, (name, kept)).start()
        return None

    yard.faults |= {102: fault, 104: fault}
    run = train(algorithm, link, rounds=4, cohort=CLIENTS)
    assert [record["round"] for record in run.history if "skipped" in record] == [2]
    run.history = [record for record in run.history if "skipped" not in record]
    assert_same(run, replayed(algorithm, run))


@pytest.mark.parametrize("name", ["fedbuff", "fedasync_fedova"])
def test_a_server_that_was_started_again_goes_on(name: str, tmp_path: Path) -> None:
    """Models, versions and buffers are those of the checkpoint; what was under way is sent out anew."""
    algorithm, observe = ALGORITHMS[name](), fedge.Observe(checkpoint_every=1)
    _, link = fleet(algorithm, UNEVEN)
    train(algorithm, link, rounds=2, cohort=5, out=tmp_path / "run", observe=observe)
    _, again = fleet(algorithm, UNEVEN)
    run = train(algorithm, again, rounds=5, cohort=5, out=tmp_path / "run", observe=observe, resume=True)
    assert [record["round"] for record in run.history] == [1, 2, 3, 4, 5]
    assert_same(run, replayed(algorithm, run))


def test_bytes_are_booked_when_they_are_sent() -> None:
    """53 parameters of 8 bytes; who is under way at the end has been sent them."""
    algorithm = fedge.FedBuff(fedavg(), buffer=2)
    yard, link = fleet(algorithm)
    run = train(algorithm, link, rounds=3, cohort=4)
    sent = [message for message in yard.sent if message.metadata.message_type == "train.work"]
    assert sum(row.down for row in run.ledger) == len(sent) * 424
    assert sum(row.clients for row in run.ledger) == len(sent)
    assert [row.up for row in run.ledger] == [4 * 428] * 3
    assert all(row.wire_down > row.down and row.wire_up > row.up for row in run.ledger)


def test_a_simulated_state_is_refused() -> None:
    algorithm = ALGORITHMS["fedbuff"]()
    _, link = fleet(algorithm)
    with pytest.raises(ValueError, match="this state is that of a simulation"):
        link.advance({"models": [], "events": {"flights": []}}, 0, 1, 3)


def test_a_node_that_crashes_and_keeps_silent_holds_up_nobody() -> None:
    """It works once, so that its silence is forgotten, crashes at once, and lets the greeting wait."""
    algorithm = fedge.FedBuff(fedavg(), buffer=2)
    yard, link = fleet(algorithm, dict.fromkeys((0, 1, 3, 4, 5, 6), 0.2), deadline=600.0)
    works = itertools.count()

    def fault(reply: Message) -> Message | None:
        if "seconds" not in unpack(reply.content)[0]:
            return None  # the greeting
        if next(works) % 2 == 0:
            return reply
        crash = Error(ErrorCode.CLIENT_APP_CRASHED, "it crashed")
        return SimpleNamespace(metadata=reply.metadata, error=crash, has_error=lambda: True, children={}, deflate=bytes)

    yard.faults[102] = fault
    begin = time.monotonic()
    run = train(algorithm, link, rounds=6, cohort=CLIENTS)
    assert time.monotonic() - begin < 15
    assert [drop["client"] for record in run.history for drop in record["dropped"]] == [2]
