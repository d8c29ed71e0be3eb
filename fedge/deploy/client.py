"""The device's side: a Flower ClientApp around the very worker that the loop-back link uses."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedge.core import Algorithm, At, Payload
from fedge.deploy import memory
from fedge.deploy.envelope import allowed, pack, short, unpack
from fedge.engine.clients.worker import ClientError, Worker
from fedge.engine.links import wire
from fedge.handle import Handle, parameters
from fedge.inputs import Inputs, cast, joined

Examples = tuple[Inputs, Tensor]  # x [n, ...], or several such tensors; y [n, ...]
Algorithms = Mapping[str, Algorithm[Any]]  # by label
HELLO, WORK, KEEP = "query.hello", "train.work", "train.keep"
PATIENCE, TRAVEL = 0.9, 5.0  # of the server's deadline, less these seconds: "too slow" must still arrive in time


class Refusal(ValueError):
    """Something about the node or the request; says what to do."""


def client_app(
    algorithm: Algorithm[Any] | Algorithms | Callable[[], Algorithms], load: Callable[[int], Examples]
) -> ClientApp:
    """A Flower app that does this algorithm's client work on what `load` returns for the node's partition id.

    Several algorithms go by label; a function is called inside the handler, so that what it raises reaches the server.
    Every message is answered, whatever happens inside: Flower's SuperNode waits for ever for an app that does not.
    """

    def algorithms() -> Algorithms:
        found = algorithm() if callable(algorithm) else algorithm
        return found if isinstance(found, Mapping) else {"": found}

    app, device = ClientApp(), Device(algorithms, load)
    for kind, handler in ((app.query("hello"), device.hello), (app.train("work"), device.work)):
        kind(_answering(handler))
    app.train("keep")(_answering(device.keep))
    return app


Handler = Callable[[dict[str, Any], dict[str, bytes], Context], RecordDict]


def _answering(handler: Handler) -> Callable[[Message, Context], Message]:
    """The handler, within its time limit, errors turned into answers; what it remembers after that is dropped."""

    def answer(message: Message, context: Context) -> Message:
        outcome: list[RecordDict] = []
        draft = replace(context, state=RecordDict(dict(context.state)))  # Flower reads the real one once we answer

        def work() -> None:
            try:
                head, blobs = unpack(message.content)
                outcome.append(handler(head, blobs, draft))
            except BaseException as error:
                outcome.append(pack({"error": _line(error)} | _who(context)))

        limit = max(allowed(message) / 2, PATIENCE * allowed(message) - TRAVEL)
        thread = threading.Thread(target=work, daemon=True)
        why = f"the work took longer than {limit:.3g} s"
        try:
            with _told_to_end():
                thread.start()
                thread.join(limit)
        except Ended:
            why = "the app was told to end (SIGTERM): is the device short of memory, or shutting down?"
        if not outcome:
            return Message(pack({"error": why} | _who(context)), reply_to=message)
        context.state = draft.state
        return Message(outcome[0], reply_to=message)

    return answer


class Ended(BaseException):
    """This process was told to end."""


@contextmanager
def _told_to_end() -> Iterator[None]:
    """SIGTERM raises `Ended`: Flower's handler ends the app without an answer, for which its SuperNode waits for ever.

    In a simulation the app is not in the main thread, where signals are handled.
    """

    def end(number: int, frame: object) -> None:
        raise Ended

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _line(error: BaseException) -> str:
    text = short(error)
    return text if isinstance(error, ClientError | Refusal) else f"{type(error).__name__}: {text}"


class Device:
    """What a node does with each kind of message."""

    def __init__(self, algorithms: Callable[[], Algorithms], load: Callable[[int], Examples]) -> None:
        self._algorithms, self._load = algorithms, load

    def hello(self, head: dict[str, Any], blobs: dict[str, bytes], context: Context) -> RecordDict:
        """Who this node is, how many examples it has, and which rows it holds by algorithm."""
        client = partition_id(context)
        found = self._algorithms()
        _, y = self._load(client)
        rows = {label: rows_of(algorithm, y) for label, algorithm in found.items()}
        return pack({"client": client, "examples": len(y), "rows": rows})

    def keep(self, head: dict[str, Any], blobs: dict[str, bytes], context: Context) -> RecordDict:
        """Examples that the server shares, for as long as the run lasts."""
        memory.keep_shared(context, head["shared"], blobs["shared"])
        return pack({"kept": head["shared"]} | _who(context))

    @torch.no_grad()
    def work(self, head: dict[str, Any], blobs: dict[str, bytes], context: Context) -> RecordDict:
        """The tasks of one phase, ask by ask."""
        begin = time.perf_counter()
        if "shared" in blobs:
            memory.keep_shared(context, head["shared"], blobs["shared"])
        if head["shared"] and memory.shared_token(context) != head["shared"]:
            return pack({"forgot": "the examples that were shared"} | _who(context))
        worker = self._worker(head["label"], context, bool(head["shared"]))
        memory.recall(context, head["label"], str(head.get("run", "")), worker)
        at, answers = At(*head["at"]), {}
        for round, phase, row in head.get("void", []):
            worker.memory.void(At(at.seed, round, phase), [(worker.client, row)])
        if "void_since" in head:
            worker.memory.abandon_since(head["void_since"])
        worker.memory.begin(at)
        for name, (tasks, reuse) in head["asks"].items():
            sent: dict[int, Payload] = wire.decode(blobs[name])
            _check_held(worker, at, tuple(reuse), sent)
            answers[name] = wire.encode(worker.work(at, tuple(tasks), tuple(reuse), sent))
        memory.remember(context, head["label"], str(head.get("run", "")), worker)
        spent = time.perf_counter() - begin
        seconds = {"start": max(0.0, _start() - spent), "work": spent}
        return pack({"seconds": seconds} | _who(context), answers)

    def _worker(self, label: str, context: Context, with_shared: bool) -> Worker:
        known = self._algorithms()
        if label not in known:
            raise Refusal(f"this node has no algorithm {label!r}, only {sorted(known)}: give it the same experiment")
        algorithm, client = known[label], partition_id(context)
        dtype = next(iter(parameters(algorithm.model).values())).dtype
        x, y = self._load(client)
        x, y = cast(x, dtype), cast(y, dtype)
        if with_shared:
            more_x, more_y = memory.shared(context)
            x, y = joined([x, more_x]), torch.cat([y, more_y])
        tasks = algorithm.tasks(Handle(algorithm.model, algorithm.loss, torch.device("cpu")))
        return Worker(client, x, y, tasks)


def partition_id(context: Context) -> int:
    found = context.node_config.get("partition-id")
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise Refusal(
            f"partition-id is {found!r}, it must be a whole number from 0: start the node with "
            "--node-config 'partition-id=0'"
        )
    return found


def _who(context: Context) -> dict[str, int]:
    """For the head of every answer: a node may be started again as another client, under the same Flower id."""
    try:
        return {"client": partition_id(context)}
    except Refusal:
        return {}


def rows_of(algorithm: Algorithm[Any], y: Tensor) -> list[int]:
    """The rows that this node works on, from its own labels; none for an algorithm without rows."""
    handle = Handle(algorithm.model, algorithm.loss, torch.device("cpu"))
    holds = next((task.holds for task in algorithm.tasks(handle).values() if task.holds is not None), None)
    return [] if holds is None else [int(row) for row in holds(y.unique()).nonzero().flatten()]


def _check_held(worker: Worker, at: At, reuse: tuple[str, ...], sent: dict[int, Payload]) -> None:
    for row in sent:
        held = worker.held.get(row, {}) if worker.round == at.round else {}
        missing = [name for name in reuse if name not in held and name not in sent[row]]
        if missing:
            raise Refusal(f"this node does not hold '{missing[0]}' of round {at.round} any more: it was restarted")


def _start() -> float:
    """How old this process is at its first message; later ones find it running, as in Flower's simulation."""
    global _greeted
    first, _greeted = not _greeted, True
    return _process_age() if first else 0.0


def _process_age() -> float:
    """Seconds since this process was started, on Linux; elsewhere since it imported this module."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
            return float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.perf_counter() - _IMPORTED


_IMPORTED = time.perf_counter()
_greeted = False
