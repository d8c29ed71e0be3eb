"""The link and the app of a device, on real Flower messages in one process: a fault costs one client, and is named."""

from __future__ import annotations

import io
import itertools
import re
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

import fedge
from fedge.core import At
from fedge.deploy import FlowerLink, NodesMissing, Roster, client_app, envelope, flower, memory, serve
from fedge.deploy import roster as roster_module
from fedge.deploy.client import rows_of
from fedge.deploy.envelope import allowed, pack, unpack, wire_bytes
from fedge.edge import Clock, PartialWork, Profiles
from fedge.engine import Loopback, TooFewReplies
from fedge.engine.clients.worker import Worker
from fedge.engine.links import wire
from fedge.engine.links.collector import Collector
from tests.cases import EACH_ONCE, algorithms, cases, close, ragged, toy_data, toy_model

FEDERATION = ragged(toy_data())
CLIENTS = FEDERATION.clients


def load(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    mine = FEDERATION.examples(client)
    return FEDERATION.data.train_x[mine], FEDERATION.data.train_y[mine]


class Yard(Grid):
    """Nodes in this process. A node is an app and its memory; `faults` changes what a node answers."""

    def __init__(self, app: Any, partitions: Iterable[Any] = range(CLIENTS)) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app, self.contexts = app, {}
        self.faults: dict[int, Callable[[Message], Message | None]] = {}
        self.replies: dict[str, Message] = {}
        self.numbers = itertools.count(1)
        self.slow = 0.0  # seconds that a push takes
        self.sent: list[Message] = []
        self.stuck = -1  # the node of an answer that cannot be pulled, nor given up
        for partition in partitions:
            self.join(partition)

    def join(self, partition: Any, node: int | None = None) -> int:
        """A node, or the same one again without its memory."""
        node = 100 + len(self.contexts) if node is None else node
        config = {} if partition is None else {"partition-id": partition}
        self.contexts[node] = Context(1, node, config, RecordDict(), {})
        return node

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = []
        time.sleep(self.slow)
        for message in messages:
            self.sent.append(message)
            message.metadata.__dict__["_message_id"] = str(next(self.numbers))
            sent.append(message.metadata.message_id)
            node = message.metadata.dst_node_id
            reply = self.app(message, self.contexts[node])
            if node in self.faults:
                reply = self.faults[node](reply)
            if reply is not None:
                self.replies[message.metadata.message_id] = reply
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if any(self.replies[one].metadata.src_node_id == self.stuck for one in message_ids if one in self.replies):
            time.sleep(20)
        return [self.replies.pop(one) for one in list(message_ids) if one in self.replies]

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

    create_message = set_run = run = send_and_receive  # type: ignore[assignment]


def link_to(yard: Yard, algorithm: Any, said: list[str] | None = None, wanted: int = CLIENTS, **options: Any):
    roster = Roster(yard, CLIENTS, [""], (said if said is not None else []).append)
    roster.wait(wanted, 0, 5)
    return FlowerLink(algorithm, FEDERATION, yard, roster, **({"deadline": 5.0} | options))


def trained(link: Any, algorithm: Any, rounds: int = 2) -> fedge.Run:
    return fedge.train(algorithm, FEDERATION, rounds=rounds, cohort=5, seed=3, link=link)


@pytest.mark.parametrize("name", cases(EACH_ONCE))
def test_it_agrees_with_the_loopback_link(name: str, tmp_path: Path) -> None:
    algorithm = algorithms()[name]
    if isinstance(algorithm, fedge.Private):  # devices know the seed: a fleet's server needs a secret
        (tmp_path / "noise.key").write_bytes(bytes(range(32)))
        algorithm = replace(algorithm, secret=str(tmp_path / "noise.key"))
    over = trained(link_to(Yard(client_app(algorithm, load)), algorithm, deadline=60.0), algorithm)
    back = trained(Loopback(algorithm, FEDERATION), algorithm)
    assert close(over.params, back.params) == 0
    assert over.ledger.rows == back.ledger.rows
    assert [record["dropped"] for record in over.history] == [[], []]
    assert [record["seconds"] for record in over.history] != []


ALGORITHM = fedge.FedDANE(toy_model(), lr=0.1, epochs=1, batch_size=4)


def edited(edit: Callable[[Any], Any]) -> Callable[[Message], Message]:
    def fault(reply: Message) -> Message:
        head, blobs = unpack(reply.content)
        if "seconds" in head:  # work, not the greeting
            blobs = {name: wire.encode(edit(wire.decode(blob))) for name, blob in blobs.items()}
            reply.content = pack(head, blobs)
        return reply

    return fault


def odd_weight(dtype: torch.dtype) -> Callable[[Message], Message]:
    """A weight of a type that no weight has."""
    return edited(lambda answer: {0: [(answer[0][0][0], torch.ones((), dtype=dtype))]})


def replaced(make: Callable[[dict[str, Any]], RecordDict]) -> Callable[[Message], Message]:
    def fault(reply: Message) -> Message:
        head, _ = unpack(reply.content)
        if "seconds" in head:
            reply.content = make(head)
        return reply

    return fault


def saved(answer: Any) -> bytes:
    """As a device may write it that does not use our encoder: views stay views, and claim what they do not bring."""
    buffer = io.BytesIO()
    torch.save(answer, buffer)
    return buffer.getvalue()


def answered(head: dict[str, Any], weight: torch.Tensor) -> RecordDict:
    """An answer in torch's own format, which can say more than ours."""
    return pack(head, {"0": saved({0: [({"grad": dict(toy_model().named_parameters())}, weight)]})})


def saved_weight(dtype: torch.dtype) -> Callable[[Message], Message]:
    return replaced(lambda head: answered(head, torch.ones((), dtype=torch.uint8).view(dtype)))


def huge(head: dict[str, Any]) -> RecordDict:
    leaves = {name: torch.zeros(1).expand(10**13) for name in dict(toy_model().named_parameters())}
    return pack(head, {"0": saved({0: [({"grad": leaves}, torch.ones(()))]})})


def nan(answer: Any) -> Any:
    for uploads in answer.values():
        for upload, _ in uploads:
            for part in upload.values():
                for leaf in part.values():
                    leaf.fill_(float("nan"))
    return answer


FAULTS: dict[str, tuple[Callable[[Message], Message | None], str]] = {
    "nan": (edited(nan), "is not finite"),
    "rows": (edited(lambda answer: {7: answer[0]}), r"answered rows \[7\], asked were \[0\]"),
    "too many": (edited(lambda answer: {0: answer[0] * 2}), "answered 2 uploads, asked were 1"),
    "a list": (edited(lambda answer: [1, 2]), "the answer is a list, not uploads by row"),
    "no weight": (
        edited(lambda answer: {0: [(answer[0][0][0], "much")]}),
        "not a list of uploads, each with its weight",
    ),
    "whole weight": (odd_weight(torch.int64), "not a list of uploads, each with its weight"),
    "half weight": (odd_weight(torch.float16), "not a list of uploads, each with its weight"),
    "float8 weight": (saved_weight(torch.float8_e5m2), "the answer cannot be read"),
    "sparse weight": (replaced(lambda head: answered(head, torch.ones(1).to_sparse())), "the answer cannot be read"),
    "huge view": (replaced(huge), "the answer cannot be read"),
    "garbage": (replaced(lambda head: pack(head, {"0": b"\x00garbage"})), "the answer cannot be read, 8 bytes"),
    "nothing": (replaced(lambda head: pack(head)), "the answer cannot be read, 0 bytes"),
    "other names": (replaced(lambda head: pack(head, {"x": b""})), "a part that nobody asked for: 'x'"),
    "no head": (replaced(lambda head: RecordDict({})), "the message cannot be read"),
    "error": (
        lambda reply: Message(Error(1, "out of memory"), reply_to=reply),
        r"Flower says: out of memory \(code 1\)",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_bad_answer_costs_one_client_and_is_named(kind: str) -> None:
    fault, reason = FAULTS[kind]
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM)

    def reply_to_the_same(reply: Message) -> Message | None:
        changed = fault(reply)
        if changed is not None and changed is not reply:
            changed.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
        return changed

    cohort = trained(Loopback(ALGORITHM, FEDERATION), ALGORITHM, 1).history[0]["cohort"]
    yard.faults[100 + cohort[1]] = reply_to_the_same
    run = trained(link, ALGORITHM, 1)
    (dropped,) = run.history[0]["dropped"]
    assert (dropped["client"], dropped["task"]) == (cohort[1], "gradient")
    assert re.search(reason, dropped["reason"]), dropped["reason"]
    assert close(run.params, without(cohort[1]).params) == 0


def test_an_upload_is_not_booked_at_the_size_that_it_claims() -> None:
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM)
    yard.faults[102] = replaced(huge)
    run = fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link)
    full = fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0)
    assert [drop["client"] for drop in run.history[0]["dropped"]] == [2]
    assert [row.up * CLIENTS for row in run.ledger] == [row.up * (CLIENTS - 1) for row in full.ledger]


def test_an_error_while_an_answer_is_checked_costs_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM)
    add = Collector.add

    def fails(self: Collector, client: int, answer: Any) -> None:
        if client == 2:
            raise NotImplementedError("no such kernel")
        add(self, client, answer)

    monkeypatch.setattr(Collector, "add", fails)
    run = fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link)
    reasons = {drop["reason"] for drop in run.history[0]["dropped"]}
    assert reasons == {"the answer cannot be checked: NotImplementedError: no such kernel"}
    assert {drop["client"] for drop in run.history[0]["dropped"]} == {2}


@pytest.mark.parametrize("seconds", [10**400, float("inf"), "long", [1], None], ids=lambda it: str(it)[:4])
def test_what_a_node_says_of_its_seconds_is_telemetry_only(seconds: Any) -> None:
    timings: list[Any] = []
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM, clocked=timings.append)
    yard.app, app = lambda message, context: clocked(app(message, context)), yard.app

    def clocked(reply: Message) -> Message:
        head, blobs = unpack(reply.content)
        reply.content = pack(head | {"seconds": {"start": seconds}}, blobs)
        return reply

    run = fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link)
    assert run.history[0]["dropped"] == []
    assert {(timing.start, timing.work) for timing in timings} == {(0.0, 0.0)}


@pytest.mark.parametrize("seconds", [{"start": 8e307, "work": 8e307}, {"start": 60, "work": 1e9}])
def test_nothing_takes_longer_than_its_phase(seconds: dict[str, float]) -> None:
    timings: list[Any] = []
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM, clocked=timings.append)

    def slow(reply: Message) -> Message:
        head, blobs = unpack(reply.content)
        return with_content(reply, pack(head | {"seconds": seconds}, blobs))

    yard.faults[102] = slow
    run = fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link)
    phases = [phase["seconds"] for phase in run.history[0]["phases"]]
    assert [(one.start, one.work) for one in timings] == [(one, one) for one in phases]
    told = [row[1:3] for phase in run.history[0]["phases"] for row in phase["clients"] if row[0] == 2]
    assert told == [[one, one] for one in phases]


def without(client: int) -> fedge.Run:
    """The same round in which that client is never asked."""
    link = Loopback(ALGORITHM, FEDERATION)
    jobs = link.directory.jobs
    link.directory.jobs = lambda clients, *rest: jobs(clients[clients != client], *rest)
    return trained(link, ALGORITHM, 1)


def shaky(what: Callable[[], Any]) -> tuple[fedge.FedAvg, list[bool]]:
    """FedAvg whose loss does something else when the flag is up."""
    flag = [False]

    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if flag[0]:
            what()
        return fedge.cross_entropy(logits, y)

    return fedge.FedAvg(toy_model(), epochs=1, batch_size=4, loss=loss), flag


def leave() -> None:
    raise SystemExit(3)


def divide() -> None:
    1 / 0  # noqa: B018


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (divide, r"task 'train', client 2, step 0: ZeroDivisionError: division by zero"),
        (leave, "SystemExit: 3"),
        (lambda: time.sleep(30), r"the work took longer than 0\.5 s"),
    ],
    ids=["raises", "exits", "hangs"],
)
def test_whatever_happens_inside_the_app_answers(what: Callable[[], Any], reason: str) -> None:
    algorithm, flag = shaky(what)
    app = client_app(algorithm, load)
    yard = Yard(app)
    link = link_to(yard, algorithm, deadline=1.0)

    def only_two(message: Message, context: Context) -> Message:
        flag[0] = context.node_config["partition-id"] == 2
        return app(message, context)

    yard.app = only_two
    run = fedge.train(algorithm, FEDERATION, rounds=1, seed=0, link=link)
    flag[0] = False
    (dropped,) = run.history[0]["dropped"]
    assert re.fullmatch(reason, dropped["reason"]), dropped["reason"]


def test_a_node_that_does_not_answer_is_given_up_at_the_deadline() -> None:
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM, deadline=0.5)
    yard.faults[103] = lambda reply: None
    begin = time.monotonic()
    run = fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link)
    assert run.history[0]["dropped"] == [{"client": 3, "task": "gradient", "reason": "no answer within 0.5 s"}]
    assert time.monotonic() - begin < 6


def test_an_answer_after_the_deadline_does_not_count() -> None:
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM, deadline=0.5)

    def late(reply: Message) -> None:
        threading.Timer(1.2, yard.replies.__setitem__, (reply.metadata.reply_to_message_id, reply)).start()

    yard.faults[103] = late
    run = fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link)
    assert run.history[0]["dropped"] == [{"client": 3, "task": "gradient", "reason": "no answer within 0.5 s"}]


def test_the_deadline_begins_when_all_is_sent() -> None:
    """A SuperLink that is away for a while blocks the sending."""
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM, deadline=0.5)
    yard.slow = 0.7
    run = fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link)
    assert run.history[0]["dropped"] == []
    work = yard.sent[-1]
    assert work.metadata.ttl == 1.0, "Flower keeps the message while it is sent"
    assert allowed(work) == 0.5, "the device is told what the server waits for"


def test_an_answer_that_blocks_when_it_is_pulled_costs_one_client() -> None:
    """As one does that a node was uploading when it died: Flower tries for minutes."""
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM, deadline=2.0)
    yard.stuck = 102
    begin = time.monotonic()
    run = fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link)
    assert run.history[0]["dropped"] == [{"client": 2, "task": "gradient", "reason": "no answer within 2 s"}]
    assert time.monotonic() - begin < 15


def test_an_error_of_the_grid_itself_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM)

    def stopped(message_ids: Iterable[str]) -> Iterable[Message]:
        raise ConnectionError("the run was stopped")

    monkeypatch.setattr(yard, "pull_messages", stopped)
    with pytest.raises(ConnectionError, match="the run was stopped"):
        fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link)


def test_too_few_good_replies_is_an_error() -> None:
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM, deadline=0.5, min_replies=6)
    for node in (101, 103):
        yard.faults[node] = lambda reply: None
    with pytest.raises(
        TooFewReplies, match=r"round 1: task 'gradient' has good uploads of 5 clients, 6 needed \(client 1: no answer"
    ) as caught:
        fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link)
    assert "step size" not in str(caught.value)


def test_a_node_that_is_not_there_costs_nothing_and_may_join_later() -> None:
    said: list[str] = []
    yard = Yard(client_app(ALGORITHM, load), range(CLIENTS - 1))
    link = link_to(yard, ALGORITHM, said)
    first = fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link)
    reason = {"client": 6, "task": "gradient", "reason": "its node is not connected"}
    assert first.history[0]["dropped"] == [reason]
    full = fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0)
    assert first.ledger[0].down == full.ledger[0].down * 6 // 7
    yard.join(6)
    second = fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link, start=first)
    assert second.history[1]["dropped"] == []
    assert said == ["6 of 7 nodes are connected"]


def test_a_node_that_was_started_anew_in_a_round_says_so_and_takes_part_in_the_next() -> None:
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM)
    work = yard.app

    def forgetful(message: Message, context: Context) -> Message:
        head, _ = unpack(message.content)
        if head.get("at", [0, 0, 0])[1:] == [1, 1] and context.node_id == 104:
            context.state = RecordDict()
        return work(message, context)

    yard.app = forgetful
    run = fedge.train(ALGORITHM, FEDERATION, rounds=2, seed=0, link=link)
    (dropped,) = run.history[0]["dropped"]
    assert (dropped["client"], dropped["task"]) == (4, "solve")
    assert dropped["reason"] == "this node does not hold 'params' of round 1 any more: it was restarted"
    assert run.history[1]["dropped"] == []


def test_shared_examples_are_sent_again_to_a_node_that_lost_them() -> None:
    algorithm = fedge.DataSharing(fedge.FedAvg(toy_model(), epochs=1, batch_size=4), beta=0.3)
    yard = Yard(client_app(algorithm, load))
    link = link_to(yard, algorithm)
    first = fedge.train(algorithm, FEDERATION, rounds=1, seed=0, link=link)
    yard.join(5, node=105)
    run = first
    for _ in range(3):
        state = link._shared, link._owed  # a run that goes on replays its setup: here the node is lost after it
        share, link.share = link.share, lambda at, beta: None
        run = fedge.train(algorithm, FEDERATION, rounds=1, seed=0, link=link, start=run)
        link.share = share
        assert state[0] == link._shared
    (dropped,) = run.history[1]["dropped"]
    assert dropped["client"] == 5
    assert "lost the examples that were shared and is sent them again" in dropped["reason"]
    assert run.history[2]["dropped"] == run.history[3]["dropped"] == []
    carried = [
        m.metadata.dst_node_id for m in yard.sent if "at" in unpack(m.content)[0] and "shared" in unpack(m.content)[1]
    ]
    assert carried == [105], "once, to the node that lost them"


def test_what_one_algorithm_holds_is_not_held_by_another() -> None:
    """Two algorithms on a node name their parts alike and count their rounds alike."""
    context = Context(1, 100, {"partition-id": 0}, RecordDict(), {})
    x, y = load(0)
    first, same, other = (Worker(0, x, y, {}) for _ in range(3))
    first.round, first.held = 4, {0: {"params": {"w": torch.ones(2)}}}
    memory.remember(context, "first", "run", first)
    memory.recall(context, "first", "run", same)
    memory.recall(context, "other", "run", other)
    assert (same.round, list(same.held)) == (4, [0])
    assert (other.round, other.held) == (-1, {})


def test_a_node_forgets_what_it_remembers_of_another_run() -> None:
    context = Context(1, 100, {"partition-id": 0}, RecordDict(), {})
    x, y = load(0)
    first, same, later = (Worker(0, x, y, {}) for _ in range(3))
    first.memory.put(At(0, 3, 0), [(0, 0)], {"mine": {"w": torch.ones(1, 2)}})
    memory.remember(context, "first", "one run", first)
    memory.recall(context, "first", "one run", same)
    memory.recall(context, "first", "another", later)
    assert same.memory.knows("mine", [(0, 0)]) == [True]
    assert later.memory.knows("mine", [(0, 0)]) == [False]


def test_what_a_node_that_always_fails_is_told_does_not_grow() -> None:
    """Of every bad round the next message had to say that it does not count."""
    algorithm = algorithms()["scaffold"]
    yard = Yard(client_app(algorithm, load))
    link = link_to(yard, algorithm)
    yard.faults[102] = replaced(lambda head: pack({"client": 2, "seconds": {}, "error": "no"}))
    trained(link, algorithm, rounds=2)
    few = len(str(unpack(yard.sent[-1].content)[0]))
    fedge.train(algorithm, FEDERATION, rounds=30, seed=3, link=link)
    told = [unpack(m.content)[0] for m in yard.sent if m.metadata.dst_node_id == 102]
    assert len(str(told[-1])) < few + 100
    assert told[-1]["void"] == [[1, 0, 0]]
    assert told[-1]["void_since"] == 2


def test_a_node_forgets_all_that_did_not_count_since_it_was_last_heard() -> None:
    """Rounds 2 and 3 do not reach the server: in round 4 the node works as if it had not worked in them."""
    algorithm = fedge.SCAFFOLD(toy_model(), lr=0.1, epochs=1, batch_size=4, clients=CLIENTS)
    yard = Yard(client_app(algorithm, load))
    link, works = link_to(yard, algorithm), itertools.count(1)

    def fault(reply: Message) -> Message:
        bad = "seconds" in unpack(reply.content)[0] and next(works) in (2, 3)
        return replaced(lambda head: pack({"client": 2, "error": "no"}))(reply) if bad else reply

    yard.faults[102] = fault
    run = fedge.train(algorithm, FEDERATION, rounds=5, seed=3, link=link)

    class Deaf(Loopback):
        def client(self, client, at, ask, request):
            answer = super().client(client, at, ask, request)
            return b"" if client == 2 and at.round in (2, 3) else answer

    wanted = fedge.train(algorithm, FEDERATION, rounds=5, seed=3, link=Deaf(algorithm, FEDERATION))
    assert close(run.params, wanted.params) == 0


@pytest.mark.parametrize("shared", [False, True])
def test_what_did_not_count_is_told_after_the_server_was_started_again(shared: bool, tmp_path: Path) -> None:
    """Client 2's answer of round 2 is lost, and then the server: in round 3 it works as if it had not worked in 2.

    Where examples are shared, the new server sends them first, in messages that say nothing of what did not count.
    """
    algorithm = fedge.SCAFFOLD(toy_model(), lr=0.1, epochs=1, batch_size=4, clients=CLIENTS)
    algorithm = fedge.DataSharing(algorithm, beta=0.3) if shared else algorithm
    found = []
    for split in (False, True):
        yard, works = Yard(client_app(algorithm, load)), itertools.count(1)

        def fault(reply: Message, works=works) -> Message:
            bad = "seconds" in unpack(reply.content)[0] and next(works) == 2
            return replaced(lambda head: pack({"client": 2, "error": "no"}))(reply) if bad else reply

        yard.faults[102] = fault
        every, folder = fedge.Observe(checkpoint_every=1), tmp_path / str(split)
        rest = {"seed": 3, "observe": every, "out": folder}
        if split:
            fedge.train(algorithm, FEDERATION, rounds=2, link=link_to(yard, algorithm), **rest)
        run = fedge.train(algorithm, FEDERATION, rounds=4, link=link_to(yard, algorithm), resume=split, **rest)
        found.append(run)
        told = [head["void"] for one in yard.sent if "void" in (head := unpack(one.content)[0])]
        assert told == [[[2, 0, 0]]]
    assert close(found[0].params, found[1].params) == 0


@pytest.mark.parametrize("said", ["error", "client", "forgot", "examples"])
def test_a_head_that_takes_long_to_write_out_is_not_written_out(said: str) -> None:
    """A thousand tensors in place of a word, a megabyte, took six seconds of the server's, in every round."""
    yard = Yard(client_app(ALGORITHM, load))
    long = [torch.rand(500).half() for _ in range(900)]
    if said == "examples":
        yard.faults[102] = lambda reply: with_content(reply, pack({"client": 2, "rows": {"": []}, said: long}))
    link = link_to(yard, ALGORITHM, wanted=6)
    if said != "examples":
        yard.faults[102] = replaced(lambda head: pack(head | {said: long}))
    begin = time.perf_counter()
    run = trained(link, ALGORITHM)
    assert time.perf_counter() - begin < 5
    dropped = [drop for record in run.history for drop in record["dropped"] if drop["client"] == 2]
    assert all("a list" in drop["reason"] or "no node is this client" in drop["reason"] for drop in dropped)
    assert {drop["client"] for record in run.history for drop in record["dropped"]} == {2}


def test_one_array_of_many_names_is_not_unpacked_for_each_of_them() -> None:
    """A greeting of less than a megabyte took 3 GB: every name had a copy of its own."""
    array = Array("uint8", (100_000,), f"{envelope.STAMPED}5000000", bytes(100_000))
    record = ArrayRecord({str(place): array for place in range(2_000)})
    answer = RecordDict({**pack({"client": 2}), envelope.BLOBS: record})
    for wanted in ((), (0, 1)):
        tracemalloc.start()
        with pytest.raises(ValueError, match="its answer has a part that nobody asked for"):
            envelope.opened(answer, wanted)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 5_000_000


def test_a_head_of_many_megabytes_is_refused_unread() -> None:
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM)
    yard.faults[102] = replaced(lambda head: pack(head | {"error": torch.zeros(1 << 19)}))
    run = trained(link, ALGORITHM)
    reasons = {drop["reason"] for record in run.history for drop in record["dropped"]}
    assert len(reasons) == 1
    assert "bytes, at most 1048576 are read" in reasons.pop()


def test_a_head_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at all if it is refused for its size: fifteen megabytes took seconds, twice, for the times alone."""
    read: list[int] = []
    unpacked = envelope.unpack
    monkeypatch.setattr(envelope, "unpack", lambda records: (read.append(len(records)), unpacked(records))[1])
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM)
    yard.faults[102] = replaced(lambda head: pack(head | {"error": torch.zeros(1 << 19)}))
    read.clear()
    monkeypatch.setattr(flower, "unpack", envelope.unpack, raising=False)
    run = fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link)
    assert [drop["client"] for drop in run.history[0]["dropped"]] == [2]
    answers = [len(phase["clients"]) for phase in run.history[0]["phases"]]
    assert (len(read), answers) == (CLIENTS - 1 + CLIENTS - 1, [CLIENTS, CLIENTS - 1])  # client 2 once, unread


def with_content(reply: Message, content: RecordDict) -> Message:
    reply.content = content
    return reply


def test_a_letter_that_the_output_does_not_have_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a node says of itself is printed, and the output may be in the letters of one half of Europe."""
    yard = Yard(client_app(ALGORITHM, load))

    def fault(reply: Message) -> Message:
        if "rows" in unpack(reply.content)[0]:
            reply.content = pack({"client": 2, "error": "\u4f60\u597d"})
        return reply

    yard.faults[102] = fault
    with io.TextIOWrapper(io.BytesIO(), "latin-1") as output:
        monkeypatch.setattr("sys.stdout", output)
        run = serve(yard, ALGORITHM, FEDERATION, nodes=CLIENTS - 1, wait=1.0, deadline=5.0, rounds=1, seed=0)
        output.seek(0)
        assert r"node 102 is left out: \u4f60\u597d" in output.read()
    assert [drop["client"] for drop in run.history[0]["dropped"]] == [2]


def test_who_a_node_is_must_be_clear() -> None:
    said: list[str] = []
    yard = Yard(client_app(ALGORITHM, load), [0, 1, 1, 9, None, -1, True])
    link_to(yard, ALGORITHM, said, wanted=2)
    text = "\n".join(said)
    assert "node 102 is left out: node 101 is client 1 already" in text
    assert re.search(r"node 103 is left out: .*IndexError|node 103 is left out: its partition-id is 9", text)
    for node in (104, 105, 106):
        assert re.search(rf"node {node} is left out: partition-id is .*, it must be a whole number from 0", text)
    assert "2 of 2 nodes are connected" in text


@pytest.mark.parametrize("rows", [None, "all", {"": "all"}, {"": [[1]]}, {"other": [1]}])
def test_a_node_that_tells_nonsense_of_its_rows_is_left_out(rows: Any) -> None:
    said: list[str] = []
    yard = Yard(client_app(ALGORITHM, load), range(2))

    def nonsense(reply: Message) -> Message:
        reply.content = pack({"client": 1, "examples": 3, "rows": rows})
        return reply

    yard.faults[101] = nonsense
    link_to(yard, ALGORITHM, said, wanted=1)
    assert said[0].startswith("node 101 is left out: it did not say which rows it holds")


@pytest.mark.parametrize("examples", [None, 0, -1, 1.5, True, "many", 10**30])
def test_a_node_that_tells_nonsense_of_its_examples_is_left_out(examples: Any) -> None:
    said: list[str] = []
    yard = Yard(client_app(ALGORITHM, load), range(2))

    def nonsense(reply: Message) -> Message:
        reply.content = pack({"client": 1, "examples": examples, "rows": {"": []}})
        return reply

    yard.faults[101] = nonsense
    link_to(yard, ALGORITHM, said, wanted=1)
    assert re.match(r"node 101 is left out: it says that it has .* examples, it must have at least 1", said[0])


def test_a_node_with_other_examples_than_the_experiment_gives_it_is_left_out() -> None:
    said: list[str] = []
    yard = Yard(client_app(ALGORITHM, load), range(2))
    sizes = [*FEDERATION.sizes.tolist()]
    sizes[1] += 1
    Roster(yard, CLIENTS, [""], said.append, sizes).wait(1, 0, 5)
    assert said[0] == (
        f"node 101 is left out: it has {sizes[1] - 1} examples, client 1 of the experiment has {sizes[1]}: give it the "
        "same experiment and data"
    )


def test_a_node_that_claims_other_labels_than_the_experiment_gives_it_is_left_out() -> None:
    said: list[str] = []
    algorithm = algorithms()["fedova_fedavg"]
    yard = Yard(client_app(algorithm, load), range(2))

    def greedy(reply: Message) -> Message:
        head, blobs = unpack(reply.content)
        return with_content(reply, pack(head | {"rows": {"": [0, 1, 2]}}, blobs))

    yard.faults[101] = greedy
    roster = Roster(yard, CLIENTS, [""], said.append, holds=lambda client, label: rows_of(algorithm, load(client)[1]))
    roster.wait(1, 0, 5)
    assert list(roster.nodes) == [0]
    assert said[0] == (
        "node 101 is left out: it says that it holds the labels [0, 1, 2], client 1 of the experiment holds others: "
        "give it the same experiment and data"
    )


def test_a_node_weighs_no_more_than_it_said_when_it_joined() -> None:
    """A device of its own data is believed once: 3 examples are not 4 in its answers."""
    yard = Yard(client_app(ALGORITHM, load))

    def fewer(reply: Message) -> Message:
        head, blobs = unpack(reply.content)
        reply.content = pack(head | {"examples": 3} if "examples" in head else head, blobs)
        return reply

    yard.faults[101] = fewer
    run = trained(link_to(yard, ALGORITHM), ALGORITHM, rounds=3)
    dropped = [drop for record in run.history for drop in record["dropped"]]
    asked = sum(1 in record["cohort"] for record in run.history)
    assert asked == len(dropped) > 0
    assert {(drop["client"], drop["reason"]) for drop in dropped} == {
        (1, "weight 17 is not in (0, 3], the most that this client may weigh")
    }


def test_without_any_node_there_is_no_run() -> None:
    with pytest.raises(NodesMissing, match="no node of 7 connected within 0 s"):
        link_to(Yard(client_app(ALGORITHM, load), []), ALGORITHM)


def test_a_device_without_the_algorithm_says_which_it_has() -> None:
    yard = Yard(client_app({"": ALGORITHM}, load))
    link = link_to(yard, ALGORITHM, min_replies=1)
    yard.app = client_app({"other": ALGORITHM}, load)
    with pytest.raises(TooFewReplies, match=r"this node has no algorithm '', only \['other'\]"):
        fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link)


def test_what_a_device_cannot_build_reaches_the_server() -> None:
    said: list[str] = []

    def broken() -> Any:
        raise ImportError("no module named sensors")

    with pytest.raises(NodesMissing):
        link_to(Yard(client_app(broken, load)), ALGORITHM, said)
    assert "node 100 is left out: ImportError: no module named sensors" in said


def beside(reply: Message) -> Message:
    """Half a megabyte in a record of its own."""
    reply.content["stowaway"] = ArrayRecord({"x": Array("uint8", (500_000,), "fedge", bytes(500_000))})
    return reply


def in_blobs(reply: Message) -> Message:
    """Half a megabyte as the answer to an ask that was not."""
    head, blobs = unpack(reply.content)
    reply.content = pack(head, blobs | {"7": bytes(500_000)})
    return reply


def in_head(reply: Message) -> Message:
    head, blobs = unpack(reply.content)
    reply.content = pack(head | {"diary": "x" * 500_000}, blobs)
    return reply


@pytest.mark.parametrize("extra", [beside, in_blobs, in_head])
def test_parts_that_nobody_asked_for_are_refused_and_booked(extra: Callable[[Message], Message]) -> None:
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM)
    yard.faults[102] = extra
    run = more(link)
    (dropped,) = rounds_of(run)[0]
    assert dropped["client"] == 2
    assert "a part that nobody asked for: '" in dropped["reason"]
    assert len(dropped["reason"]) < 200
    assert 500_000 < next(row.wire_up for row in run.ledger if row.task == "gradient") < 600_000


def test_a_greeting_with_more_than_was_asked_for_is_refused() -> None:
    said: list[str] = []
    yard = Yard(client_app(ALGORITHM, load))
    yard.faults[102] = beside
    link_to(yard, ALGORITHM, said, wanted=CLIENTS - 1)
    assert any("node 102 is left out: its answer has a part that nobody asked for: 'stowaway'" in one for one in said)


@pytest.mark.parametrize("rows", [[1, 1, 1], [-1], [True], [0.5], "012", None, [[0]], [2**31]])
def test_rows_that_are_said_twice_or_are_none_are_refused(rows: Any) -> None:
    """A row that is said twice would count as two clients, and lift the share of a mean that one may have."""
    said: list[str] = []
    algorithm = fedge.FedOVA(fedge.FedAvg(toy_model(outputs=2), epochs=1), classes=3, weighted=True)
    yard = Yard(client_app(algorithm, load))

    def lie(reply: Message) -> Message:
        head, blobs = unpack(reply.content)
        if "rows" in head:
            reply.content = pack(head | {"rows": {"": rows}}, blobs)
        return reply

    yard.faults[102] = lie
    link = link_to(yard, algorithm, said, wanted=CLIENTS - 1)
    assert any("node 102 is left out: it did not say which rows it holds, each once" in one for one in said)
    run = fedge.train(algorithm, FEDERATION, rounds=1, seed=0, link=link)
    assert all(bool(torch.isfinite(leaf).all()) for leaf in run.params.values())


def test_rows_of_one_hash_are_refused_before_they_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty thousand of them, a megabyte, took seconds of the server's, in every round."""
    compared: list[int] = []
    monkeypatch.setattr(roster_module, "set", lambda rows: (compared.append(len(rows)), set(rows))[1], raising=False)
    for rows in ([k * (2**61 - 1) for k in range(1, 40_001)], [0, 1, 2**31]):
        assert len({hash(row) for row in rows}) in (1, 3)
        assert not roster_module._are_rows(rows)
    assert compared == []
    assert roster_module._are_rows([2, 0, 2**31 - 1])
    assert compared == [3]


def test_the_order_of_rows_is_the_servers() -> None:
    yard = Yard(client_app(ALGORITHM, load))
    yard.faults[102] = lambda reply: with_content(reply, pack({"client": 2, "examples": 3, "rows": {"": [2, 0, 1]}}))
    roster = Roster(yard, CLIENTS, [""])
    roster.wait(CLIENTS, 0, 5)
    assert roster.rows[2] == {"": [0, 1, 2]}


def test_a_deadline_must_be_positive() -> None:
    with pytest.raises(ValueError, match="deadline is 0"):
        link_to(Yard(client_app(ALGORITHM, load)), ALGORITHM, deadline=0)


def rounds_of(run: fedge.Run) -> list[list[Any]]:
    return [record["dropped"] for record in run.history]


def more(link: FlowerLink, run: fedge.Run | None = None, rounds: int = 1) -> fedge.Run:
    return fedge.train(ALGORITHM, FEDERATION, rounds=rounds, seed=0, link=link, start=run)


def test_a_node_that_was_started_again_as_another_client_is_refused() -> None:
    """Flower knows a node by its key: its id stays, whatever its partition-id is; and the key is client 2's."""
    yard = Yard(client_app(ALGORITHM, load), range(CLIENTS - 1))
    link = link_to(yard, ALGORITHM, wanted=CLIENTS - 1)
    yard.join(6, node=102)
    run = more(link, more(link), 2)
    reason = "its node is client 6 now: it was started again with another partition-id"
    assert {drop["client"]: drop["reason"] for drop in rounds_of(run)[0]}[2] == reason
    words = "it says that it is client 6, but its key is client 2's: start it with partition-id=2"
    for dropped in rounds_of(run)[1:]:
        assert {drop["client"]: drop["reason"] for drop in dropped} == {
            2: f"node 102 is left out: {words}",
            6: "its node is not connected",
        }
    yard.join(2, node=102)
    assert [drop["client"] for drop in rounds_of(more(link, run, 3))[-1]] == [6]


def test_a_node_without_a_partition_id_is_not_booked_as_the_old_one() -> None:
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM)
    yard.join(None, node=102)
    run = more(link, rounds=2)
    for (dropped,) in rounds_of(run):
        assert dropped["client"] == 2
        assert "partition-id is None, it must be a whole number from 0" in dropped["reason"]
    yard.join(2, node=102)
    assert settled(link, run)


def settled(link: FlowerLink, run: fedge.Run) -> bool:
    """Within a few rounds nobody is dropped any more."""
    for _ in range(5):
        run = more(link, run)
        if not rounds_of(run)[-1]:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "stays"])
def test_a_node_that_was_put_right_takes_part(leaves: bool) -> None:
    said: list[str] = []
    yard = Yard(client_app(ALGORITHM, load), [*range(CLIENTS - 1), 5])
    link = link_to(yard, ALGORITHM, said, wanted=CLIENTS - 1)
    first = more(link, rounds=2)
    why = "node 106 is left out: node 105 is client 5 already; give each its partition-id"
    for (dropped,) in rounds_of(first):
        assert dropped == {"client": 6, "task": "gradient", "reason": f"no node is this client: {why}"}
    assert said.count(why) == 1
    if leaves:
        del yard.contexts[106]
        first = more(link, first)
        assert rounds_of(first)[-1][0]["reason"] == "its node is not connected"
    yard.join(6, node=106)
    assert settled(link, first)


def test_a_node_whose_examples_could_not_be_loaded_is_asked_again() -> None:
    broken = [True]

    def flaky(client: int) -> tuple[torch.Tensor, torch.Tensor]:
        if client == 3 and broken[0]:
            raise OSError("the disk is not mounted")
        return load(client)

    yard = Yard(client_app(ALGORITHM, flaky))
    link = link_to(yard, ALGORITHM)
    first = more(link)
    (dropped,) = rounds_of(first)[0]
    assert dropped["client"] == 3
    assert dropped["reason"] == "node 103 is left out: OSError: the disk is not mounted"
    broken[0] = False
    assert settled(link, first)


def hello_only(answer: Callable[[Message], Message | None]) -> Callable[[Message], Message | None]:
    return lambda reply: answer(reply) if "rows" in unpack(reply.content)[0] else reply


def test_a_node_that_is_silent_when_greeted_delays_nobody() -> None:
    yard = Yard(client_app(ALGORITHM, load), range(CLIENTS - 1))
    link = link_to(yard, ALGORITHM, wanted=CLIENTS - 1, deadline=20.0)
    yard.faults[yard.join(6)] = hello_only(lambda reply: None)
    begin = time.monotonic()
    run = more(link, rounds=2)
    assert time.monotonic() - begin < 15
    reason = "no node is this client: node 106 has not yet said who it is"
    assert rounds_of(run) == [[{"client": 6, "task": "gradient", "reason": reason}]] * 2


def test_silence_does_not_outlast_the_wait_for_nodes_nor_a_wish_to_stop() -> None:
    yard = Yard(client_app(ALGORITHM, load))
    yard.faults[102] = hello_only(lambda reply: None)
    roster = Roster(yard, CLIENTS, [""])
    begin = time.monotonic()
    roster.wait(CLIENTS, 0.5, 60)
    assert len(roster.nodes) == CLIENTS - 1
    roster.wait(CLIENTS, 60, 60, stop=lambda: True)
    assert time.monotonic() - begin < 3


def test_a_greeting_is_booked_once_whoever_shares_it() -> None:
    """The bytes of all ledgers are those of the messages that went out and came back."""
    both = {name: algorithms()[name] for name in ("fedova_fedavg", "sharing_fedova")}
    yard = Yard(client_app(both, load), range(CLIENTS - 1))
    came: list[Message] = []
    yard.app, app = lambda message, context: came.append(app(message, context)) or came[-1], yard.app
    roster = Roster(yard, CLIENTS, both)
    roster.wait(CLIENTS - 1, 0, 5)
    down = up = 0
    for place, (label, algorithm) in enumerate(both.items()):
        link = FlowerLink(algorithm, FEDERATION, yard, roster, label=label, deadline=5.0)
        if place == 1:
            yard.join(6)  # a later joiner
        run = fedge.train(algorithm, FEDERATION, rounds=1, seed=0, link=link)
        for row in run.ledger:
            assert row.wire_down is not None
            assert row.wire_up is not None
            assert row.down < row.wire_down < row.down + 30_000 * row.clients
            assert row.up < row.wire_up < row.up + 30_000 * row.clients
            down, up = down + row.wire_down, up + row.wire_up
    assert down == sum(map(wire_bytes, yard.sent))
    assert up == sum(map(wire_bytes, came))


def test_the_record_has_the_times_of_every_node() -> None:
    """What `fedge edge fit` reads."""
    yard = Yard(client_app(ALGORITHM, load))
    run = fedge.train(ALGORITHM, FEDERATION, rounds=2, seed=0, link=link_to(yard, ALGORITHM))
    for record in run.history:
        assert [(one["round"], one["phase"]) for one in record["phases"]] == [
            (record["round"], 0),
            (record["round"], 1),
        ]
        for phase in record["phases"]:
            assert sorted(row[0] for row in phase["clients"]) == record["cohort"]
            assert all(0 < work <= phase["seconds"] and down + up > 0 for _, _, work, down, up in phase["clients"])


def test_nodes_do_whole_tasks() -> None:
    """A clock with partial work belongs around a simulator."""
    yard = Yard(client_app(ALGORITHM, load))
    link = Clock(link_to(yard, ALGORITHM), FEDERATION, Profiles("microcontroller", "wifi"), PartialWork(0.0102))
    with pytest.raises(ValueError, match="the nodes of a real fleet do whole tasks"):
        fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link)
