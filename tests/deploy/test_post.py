"""One answer that cannot be put together, or is a bomb, costs its node alone; a grid that fails costs the run."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as CHUNK
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id, get_object_tree
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

import fedge
from fedge.deploy import client_app, post
from fedge.deploy.envelope import allow, pack, stamp, unpack, wire_bytes
from fedge.deploy.post import FRAME, _letter, send
from fedge.deploy.scale import TooHeavy, Unread, pull
from tests.cases import algorithms, close
from tests.deploy.test_link import ALGORITHM, FEDERATION, Yard, link_to, load

NODE, CLIENT = 102, 2
MODEL = bytes(range(256)) * 24_000  # two chunks


def spoilt(yard: Yard, what: Callable[[Message], Any]) -> None:
    """The answers of one node come as `what` makes them; work alone, not the greeting."""
    real = yard.pull_messages

    def pulled(message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(real(message_ids))
        return [what(one) if one.metadata.src_node_id == NODE and is_work(one) else one for one in replies]

    yard.pull_messages = pulled  # type: ignore[method-assign]


def is_work(reply: Message) -> bool:
    return "seconds" in unpack(reply.content)[0]


def raising(error: BaseException) -> Callable[[Message], Any]:
    def fail(reply: Message) -> Any:
        raise error

    return fail


def status(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://127.0.0.1/v1/runtime/pull-object")
    return httpx.HTTPStatusError(f"HTTP {code}", request=request, response=httpx.Response(code, request=request))


def bare(reply: Message) -> Message:
    """Neither content nor an error."""
    reply.__dict__["_content"] = None
    return reply


def escaping(reply: Message) -> Message:
    return make_message(reply.metadata, error=Error(7, "\x1b[31mred\x07 " + "x" * 100_000))


SPOILT: dict[str, tuple[Callable[[Message], Any], str]] = {
    "no such class": (raising(KeyError("Sandwich")), "the message cannot be read: KeyError: 'Sandwich'"),
    "no children": (
        raising(ValueError("Unexpected set of `children`")),
        "the message cannot be read: ValueError: Unex",
    ),
    "no text": (raising(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")), "the message cannot be read: UnicodeDec"),
    "too deep": (raising(RecursionError("maximum recursion depth")), "the message cannot be read: RecursionError"),
    "no memory": (raising(MemoryError()), "the message cannot be read: MemoryError"),
    "the SuperLink cannot give it": (raising(status(500)), "the message cannot be read: HTTPStatusError: HTTP 500"),
    "nothing": (bare, "the message cannot be read: "),
    "escapes": (escaping, "Flower says: [31mred xxx"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_malformed_object_costs_its_client_alone(kind: str) -> None:
    what, reason = SPOILT[kind]
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM)
    spoilt(yard, what)
    run = fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link)
    (drop,) = run.history[0]["dropped"]
    assert (drop["client"], drop["task"]) == (CLIENT, "gradient")
    assert drop["reason"].startswith(reason)
    assert len(drop["reason"]) < 600
    assert drop["reason"].isprintable()


@pytest.mark.parametrize("kind", ["stopped", "gone"])
def test_a_grid_that_does_not_work_ends_the_run_at_once(kind: str) -> None:
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM, deadline=20.0)
    error: BaseException = RunNotRunningException() if kind == "stopped" else status(500)
    spoilt(yard, raising(error))
    real, calls = yard.get_node_ids, iter(range(100))
    if kind == "gone":  # the first look is fine, then nothing is

        def nodes() -> Iterable[int]:
            if next(calls):
                raise status(500)
            return real()

        yard.get_node_ids = nodes  # type: ignore[method-assign]
    begin = time.monotonic()
    with pytest.raises(type(error)):
        fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link)
    assert time.monotonic() - begin < 10


class SuperLink:
    """As much of a SuperLink as pulling an answer needs: objects by name."""

    def __init__(self, message: Message, objects: dict[str, bytes] | None = None) -> None:
        nested = get_all_nested_objects(message)
        self.objects = {name: one.deflate() for name, one in nested.items()} if objects is None else objects
        self.tree, self.message = get_object_tree(message), message_to_proto(remove_content_from_message(message))
        self.confirmed: list[str] = []

    def PullMessages(self, request: Any) -> Any:
        return SimpleNamespace(messages_list=[self.message], message_object_trees=[self.tree])

    def PullObject(self, request: Any) -> Any:
        content = self.objects[request.object_id]
        return SimpleNamespace(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.confirmed.append(request.message_object_id)


def grid_to(superlink: SuperLink) -> HttpGrid:
    grid = HttpGrid(token="token")
    grid._client = superlink  # type: ignore[assignment]
    grid.set_run(Run.create_empty(1))
    return grid


def answer(content: RecordDict) -> Message:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 7, 1
    message = make_message(Metadata(1, "", 7, 1, "asked", "", 0.0, 60.0, "train.work"), content)
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


def bomb(size: int, times: int) -> tuple[Message, dict[str, bytes]]:
    """An array that names one chunk many times: Flower puts `size * times` bytes together."""
    message = answer(RecordDict({"a": ArrayRecord({"b": Array("uint8", (size,), "fedge", bytes(size))})}))
    objects = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}
    renamed: dict[str, str] = {}
    for kind in (b"Array ", b"ArrayRecord ", b"RecordDict ", b"Message "):  # from the inside out: names are hashes
        (name,) = [name for name, content in objects.items() if content.startswith(kind)]
        content = objects.pop(name)
        head, _, body = content.partition(b"\0")
        if kind == b"Array ":
            body = json.dumps(json.loads(body) | {"arraychunk_ids": [0] * times}).encode()
        for old, new in renamed.items():
            head, body = head.replace(old.encode(), new.encode()), body.replace(old.encode(), new.encode())
        head = head.rpartition(b" ")[0] + b" %d" % len(body)
        renamed[name] = get_object_id(head + b"\0" + body)
        objects[renamed[name]] = head + b"\0" + body
    return message, objects | {"renamed": json.dumps(renamed).encode()}


def rename(tree: Any, names: dict[str, str]) -> None:
    tree.object_id = names.get(tree.object_id, tree.object_id)
    for child in tree.children:
        rename(child, names)


def bombed(size: int, times: int) -> SuperLink:
    message, objects = bomb(size, times)
    names = json.loads(objects.pop("renamed"))
    superlink = SuperLink(message, objects)
    rename(superlink.tree, names)
    superlink.message.metadata.message_id = names[message.metadata.message_id]
    return superlink


def soon() -> float:
    return time.monotonic() + 30


def test_flower_itself_unpacks_the_bomb() -> None:
    """Otherwise the next test shows nothing."""
    (reply,) = grid_to(bombed(100_000, 50)).pull_messages(["asked"])
    assert len(reply.content.array_records["a"]["b"].data) == 5_000_000


def test_a_bomb_is_not_unpacked() -> None:
    superlink = bombed(100_000, 20_000)
    tracemalloc.start()
    with pytest.raises(TooHeavy, match="2000000000 bytes once unpacked, at most 1000000 are expected") as caught:
        pull(grid_to(superlink), "asked", 1_000_000, soon())
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()
    assert 100_000 < caught.value.weight < 300_000
    assert superlink.confirmed, "the SuperLink need not keep it"


@pytest.mark.parametrize("name", ["PullMessages", "PullObject", "ConfirmMessageReceived"])
def test_a_superlink_that_is_busy_is_asked_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node's answer of many objects keeps its database for seconds: the others' answers must not be lost for it."""
    monkeypatch.setattr("fedge.deploy.scale.AGAIN", (0.01, 0.01))
    superlink = SuperLink(answer(pack({"client": 2}, {"0": b"model"})))
    real, codes = getattr(superlink, name), iter([500, 503])

    def busy(request: Any) -> Any:
        if code := next(codes, 0):
            raise status(code)
        return real(request)

    setattr(superlink, name, busy)
    (reply,), _ = pull(grid_to(superlink), "asked", FRAME, soon())
    assert unpack(reply.content) == ({"client": 2}, {"0": b"model"})


def test_what_a_superlink_refuses_is_not_asked_again() -> None:
    superlink = SuperLink(answer(pack({"client": 2})))
    asked: list[Any] = []

    def refused(request: Any) -> Any:
        asked.append(request)
        raise status(404)

    superlink.PullObject = refused  # type: ignore[method-assign]
    with pytest.raises(Unread, match="HTTPStatusError: HTTP 404"):
        pull(grid_to(superlink), "asked", FRAME, soon())
    assert len(asked) <= 2, "two objects are pulled at a time"


class Crafted:
    """Objects that Flower's own classes would not make, and the names of what is in them."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.inside: dict[str, list[str]] = {}

    def put(self, kind: str, inside: list[str], body: bytes) -> str:
        content = f"{kind} {','.join(inside)} {len(body)}\0".encode() + body
        name: str = get_object_id(content)
        self.objects[name], self.inside[name] = content, inside
        return name

    def array(self, chunk: str, times: int) -> str:
        body = {"dtype": "uint8", "shape": [1], "stype": "fedge", "arraychunk_ids": [0] * times}
        return self.put("Array", [chunk], json.dumps(body).encode())

    def tree(self, name: str) -> ObjectTree:
        return ObjectTree(object_id=name, children=[self.tree(one) for one in self.inside[name]])

    def superlink(self, record: str) -> SuperLink:
        empty = answer(RecordDict())
        content = self.put("RecordDict", [record], json.dumps({"a": record}).encode())
        root = self.put("Message", [content], empty.deflate().partition(b"\0")[2])
        superlink = SuperLink(empty, self.objects)
        superlink.tree, superlink.message.metadata.message_id = self.tree(root), root
        return superlink


def test_arrays_inside_arrays_are_not_unpacked() -> None:
    """Flower takes an array for a chunk: of 110 kB it makes as much as the device likes."""
    crafted = Crafted()
    array = crafted.array(crafted.array(crafted.put("ArrayChunk", [], bytes(100_000)), 1), 200)
    superlink = crafted.superlink(crafted.put("ArrayRecord", [array], json.dumps({"b": array}).encode()))
    tracemalloc.start()
    with pytest.raises(ValueError, match="an array in the answer is made of what is no chunk"):
        pull(grid_to(superlink), "asked", FRAME, soon())
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_the_bytes_of_what_cannot_be_read_are_booked() -> None:
    """Chunks where Flower wants a record: all of it came."""
    crafted = Crafted()
    superlink = crafted.superlink(crafted.put("ArrayChunk", [], bytes(500_000)))
    calls = {
        "GetNodes": SimpleNamespace(nodes=[]),
        "PushMessages": SimpleNamespace(message_ids=["asked"], objects_to_push=[], session_id=""),
        "PushObject": SimpleNamespace(stored=True),
    }
    for name, answered in calls.items():
        setattr(superlink, name, lambda request, answered=answered: answered)
    letter = send(grid_to(superlink), "train.work", {7: pack({})}, deadline=10.0)[7]
    assert letter.lost.startswith("the message cannot be read: ValueError: `Children` are expected")
    assert letter.up == sum(map(len, crafted.objects.values())) > 500_000


@pytest.mark.parametrize("kind", ["ConfigRecord", "Array"])
def test_an_answer_of_other_things_than_uploads_is_not_read(kind: str) -> None:
    """Items without anything in them, or lists in a shape: read, they take thirty times their size."""
    crafted, body = Crafted(), b"\x0a\x00" * 1_500_000
    if kind == "Array":
        body = b'{"dtype":"uint8","stype":"a","arraychunk_ids":[],"shape":[' + b"[]," * 1_000_000 + b"[]]}"
    record = crafted.put(kind, [], body)
    record = record if kind == "ConfigRecord" else crafted.put("ArrayRecord", [record], b'{"b":"%s"}' % record.encode())
    superlink = crafted.superlink(record)
    with pytest.raises(TooHeavy, match="the answer has over 2097152 bytes that are no uploads"):
        pull(grid_to(superlink), "asked", 100_000_000, soon())
    assert superlink.confirmed


def test_an_answer_that_is_large_is_not_pulled_to_its_end() -> None:
    arrays = {str(k): Array("uint8", (100_000,), "fedge", bytes([k]) * 100_000) for k in range(200)}
    superlink = SuperLink(answer(RecordDict({"a": ArrayRecord(arrays)})))
    pulled: list[str] = []
    real = superlink.PullObject
    superlink.PullObject = lambda request: (pulled.append(request.object_id), real(request))[1]  # type: ignore[method-assign]
    with pytest.raises(TooHeavy, match="at most 1000000 are expected"):
        pull(grid_to(superlink), "asked", 1_000_000, soon())
    time.sleep(0.2)
    assert len(pulled) < 100
    assert superlink.confirmed


def test_an_answer_that_names_equal_chunks_is_read() -> None:
    """A part of zeros is honest."""
    zeros = Array("uint8", (12_000_000,), "fedge", bytes(12_000_000))
    (reply,), _ = pull(
        grid_to(SuperLink(answer(RecordDict({"a": ArrayRecord({"b": zeros})})))), "asked", 13_000_000, soon()
    )
    assert len(reply.content.array_records["a"]["b"].data) == 12_000_000


def test_the_bytes_of_an_answer_are_those_that_came() -> None:
    """As our own messages are counted; an array that many records name comes once, and is not hashed for each."""
    honest = answer(pack({"client": 2}, {"0": bytes(range(256)) * 1000}))
    assert pull(grid_to(SuperLink(honest)), "asked", FRAME, soon())[1] == wire_bytes(honest)
    array = Array("uint8", (400_000,), "fedge", bytes(400_000))
    shared = answer(RecordDict({str(k): ArrayRecord({str(k): array}) for k in range(1000)}))
    superlink = SuperLink(shared)
    names = [name for name in superlink.objects if name != shared.object_id]
    superlink.tree = ObjectTree(object_id=shared.object_id, children=[ObjectTree(object_id=name) for name in names])
    assert wire_bytes(shared) == sum(map(len, superlink.objects.values())) < FRAME
    begin = time.process_time()
    (reply,), weight = pull(grid_to(superlink), "asked", FRAME, soon())
    pulled = time.process_time() - begin
    assert weight == wire_bytes(shared)
    begin = time.process_time()
    assert _letter(reply, 0, weight).up == weight
    assert time.process_time() - begin < max(0.01, pulled / 10)


def test_what_answers_may_weigh_is_what_uploads_may() -> None:
    """The link tells the post office, client by client."""
    yard, most = Yard(client_app(ALGORITHM, load)), []
    link = link_to(yard, ALGORITHM)

    def watched(*args: Any, **options: Any) -> Any:
        most.append(options["most"])
        return send(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedge.deploy.flower.send", watched)
        run = fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link)
    assert close(run.params, fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0).params) < 1e-6
    assert all(row.up / row.clients < limit < row.up / row.clients + 20_000 for row, one in
               zip(run.ledger, most, strict=True) for limit in one.values())  # fmt: skip


def test_a_head_has_a_limit_too() -> None:
    heavy = answer(pack({"error": "x" * (2 * FRAME)}))
    superlink = SuperLink(heavy)
    with pytest.raises(TooHeavy):
        pull(grid_to(superlink), "asked", FRAME, soon())


def test_nobody_can_name_the_objects_of_the_next_message() -> None:
    """Flower's SuperLink believes what a node says is in an object, and then refuses, or holds back, all that have it.

    Greetings say the same to all, and all messages of a run how long an answer may take.
    """

    def named(once: bytes) -> set[str]:
        return set(get_all_nested_objects(answer(allow(pack({"labels": [""]}, {"0": MODEL}, once), 600.0))))

    # message, content, two records of values; record of arrays, array, two chunks
    assert len(named(stamp()) | named(stamp())) == 2 * 8
    one = stamp()
    assert len(named(one) & named(one)) == 4, "the model is pushed once for all clients of a phase"


@pytest.mark.parametrize("size", [0, 1, CHUNK - 16, CHUNK - 15, 2 * CHUNK])
def test_stamps_do_not_change_what_is_sent(size: int) -> None:
    blob = bytes(range(256)) * (size // 256) + bytes(size % 256)
    array = pack({}, {"0": blob}, stamp()).array_records["fedge.blobs"]["0"]
    assert len(array.data) == size + 16 * max(1, -(-size // (CHUNK - 16)))
    assert unpack(pack({}, {"0": blob}, stamp()))[1]["0"] == unpack(pack({}, {"0": blob}))[1]["0"] == blob


def test_no_part_of_a_message_is_booked_below_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer names one chunk many times: what it unpacks to is more than came."""
    algorithm = algorithms()["fedper"]  # two asks in a phase
    real = pull

    def packed(grid: Any, message: str, most: int, end: float) -> tuple[list[Message], int]:
        replies, up = real(grid, message, most, end)
        if replies and replies[0].metadata.src_node_id == NODE and is_work(replies[0]):
            head, blobs = unpack(replies[0].content)
            replies[0].content = pack(head, blobs | {max(blobs): bytes(1_000_000)})
            return replies, 4_000
        return replies, up

    whole = fedge.train(
        algorithm, FEDERATION, rounds=1, seed=0, link=link_to(Yard(client_app(algorithm, load)), algorithm)
    )
    monkeypatch.setattr(post, "pull", packed)
    run = fedge.train(
        algorithm, FEDERATION, rounds=1, seed=0, link=link_to(Yard(client_app(algorithm, load)), algorithm)
    )
    assert {drop["client"] for drop in run.history[0]["dropped"]} == {CLIENT}
    assert all(row.wire_up is not None and row.wire_up > 0 for row in run.ledger)
    came, honest = (sum(row.wire_up or 0 for row in one.ledger) for one in (run, whole))
    assert abs(came - honest) < 4_000


def test_a_superlink_that_is_too_busy_to_name_its_nodes_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post, "AGAIN", (0.01,))
    yard = Yard(client_app(ALGORITHM, load))
    link = link_to(yard, ALGORITHM)
    real, codes = yard.get_nodes, iter([0, 500, 0, 503])

    def nodes() -> Any:
        if code := next(codes, 0):
            raise status(code)
        return real()

    monkeypatch.setattr(yard, "get_nodes", nodes)
    run = fedge.train(ALGORITHM, FEDERATION, rounds=3, seed=0, link=link)
    assert [record["dropped"] for record in run.history] == [[], [], []]
