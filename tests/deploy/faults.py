"""The drill's experiment, and devices that misbehave on request: a file says which client does what in which round.

Some die or hang, some lie in their uploads, some send objects that Flower cannot put together, or bombs, or texts that
a terminal would act on, and one says that it is another client. Every attack of `fedge.attacks` is among the lies: some
poison their data, one joined with a million examples, and one knows what two others would send.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import http_grid
from torch import Tensor

import fedge
from fedge import tree
from fedge.attacks.attack import ENROLLED, KINDS, Attack, Seen
from fedge.attacks.backdoor import poisoned
from fedge.core import At, Payload
from fedge.deploy import client_app, serve
from fedge.deploy.envelope import pack, unpack
from fedge.engine.clients.run_task import Upload
from fedge.engine.clients.worker import Worker
from fedge.engine.links import wire
from fedge.handle import Handle
from tests.deploy.plan import COUNTS

SEED = 3
FOLDER = "FEDGE_DRILL"  # environment: where the requests lie, one file `CLIENT-ROUND` with the name of the fault
CLIENTS, ROUNDS = "FEDGE_DRILL_CLIENTS", "FEDGE_DRILL_ROUNDS"  # environment: how many there are
NOW = ""  # the fault of this message


def federation() -> fedge.Federation:
    data, clients = fedge.data.load("digits"), int(os.environ[CLIENTS])
    return fedge.Federation(data, fedge.partition.dirichlet(data.train_y, clients, alpha=1.0, seed=0))


def _loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if NOW in INSIDE:
        INSIDE[NOW]()
    return fedge.cross_entropy(logits, y)


def _raise(text: str) -> Callable[[], None]:
    def fail() -> None:
        raise ZeroDivisionError(text)

    return fail


def _end() -> None:
    """As a service manager, or whoever watches the memory, does first."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3600)


INSIDE: dict[str, Callable[[], None]] = {
    "raises": _raise("a sensor gave nothing"),
    "escapes": _raise("\x1b[2J\x1b[31mowned\x07\n" * 500),
    "hangs": lambda: time.sleep(3600),
    "dies": lambda: os._exit(137),  # as the kernel ends it when memory is short
    "ended": _end,
}


def algorithm() -> fedge.FedDANE:
    return fedge.FedDANE(fedge.models.mlp(64, (16,), 10, seed=1), lr=0.05, mu=0.1, epochs=1, batch_size=40, loss=_loss)


def load(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    return examples(client, NOW)


def examples(client: int, fault: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """What a client has, poisoned if its fault is that."""
    fed = poisoned(federation(), fault, [client]) if fault in KINDS and KINDS[fault].poisons else federation()
    mine = fed.examples(client)
    return fed.data.train_x[mine], fed.data.train_y[mine]


def client() -> ClientApp:
    """The real app with the faults around it."""
    real, app, folder = client_app(algorithm(), load), ClientApp(), Path(os.environ[FOLDER])

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        """As long as there is a file `hello-CLIENT`, this one says that it is the client in it; `examples-CLIENT` says
        how many examples it claims to have."""
        reply, who = real(message, context), context.node_config["partition-id"]
        head, _ = unpack(reply.content)
        for name in ("hello", "examples"):
            if (path := folder / f"{name}-{who}").exists():
                head["client" if name == "hello" else name] = int(path.read_text())
        return Message(pack(head), reply_to=message)

    @app.train("work")
    def work(message: Message, context: Context) -> Message:
        global NOW
        head, sent = unpack(message.content)
        who = context.node_config["partition-id"]
        path = folder / f"{who}-{head['at'][1]}"
        NOW = path.read_text() if path.exists() else ""
        reply = real(message, context)
        if NOW in ANSWERS:
            return Message(ANSWERS[NOW](reply.content), reply_to=message)
        if NOW == "little" and "error" not in (said := unpack(reply.content))[0]:
            lies = {
                name: colluding(who, At(*head["at"]), *map(tuple, head["asks"][name]), sent[name], blob)
                for name, blob in said[1].items()
            }
            return Message(pack(said[0], lies), reply_to=message)
        return _tampered(reply, message) if NOW in TAMPERING else reply

    return app


def _tampered(reply: Message, message: Message) -> Message:
    head, blobs = unpack(reply.content)
    return Message(pack(head, {name: TAMPERING[NOW](blob) for name, blob in blobs.items()}), reply_to=message)


def _edited(edit: Any) -> Any:
    """Every first leaf of every part of every upload, edited."""

    def change(blob: bytes) -> bytes:
        answer = wire.decode(blob)
        for uploads in answer.values():
            for upload, _ in uploads:
                for part in upload.values():
                    first = next(iter(part))
                    part[first] = edit(part[first])
        return wire.encode(answer)

    return change


def _heavy(blob: bytes) -> bytes:
    """The upload as it is, with a weight that no device of the drill joined with."""
    return wire.encode(
        {row: [(up, torch.full_like(weight, 1e5)) for up, weight in ups] for row, ups in wire.decode(blob).items()}
    )


def _forged(kind: str) -> Callable[[bytes], bytes]:
    """Every upload as a liar of `fedge.attacks` sends it; a device sees its own alone."""

    def lie(upload: Payload, weight: Tensor) -> tuple[Payload, Tensor]:
        alone = {name: tree.map_(lambda leaf: leaf[None], part) for name, part in upload.items()}
        most = torch.full((1,), ENROLLED) if kind == "weight_liar" else weight.reshape(1)
        seen = Seen(torch.tensor([True]), torch.tensor([0]), most)
        forged, claimed = Attack(kind).forged(alone, weight.reshape(1), seen)
        return {name: tree.take(part, 0) for name, part in forged.items()}, claimed.reshape(weight.shape)

    return lambda blob: wire.encode({row: [lie(*one) for one in ups] for row, ups in wire.decode(blob).items()})


def colluding(
    client: int, at: At, tasks: tuple[str, ...], reuse: tuple[str, ...], request: bytes, answer: bytes
) -> bytes:
    """ "A little is enough" of a client that has the data of the next two; where these hold nothing it is honest."""
    if reuse:
        return answer
    known = algorithm().tasks(Handle(algorithm().model, algorithm().loss, torch.device("cpu")))
    others = [(client + step) % int(os.environ[CLIENTS]) for step in (1, 2)]
    each = [Worker(one, *examples(one), known).work(at, tasks, reuse, wire.decode(request)) for one in others]
    return wire.encode(
        {
            row: [_little(one, [found[row][place] for found in each]) for place, one in enumerate(uploads)]
            for row, uploads in wire.decode(answer).items()
        }
    )


def _little(own: Upload, others: list[Upload]) -> Upload:
    everybody = [own, *others]
    stacked = {name: tree.stack([upload[name] for upload, _ in everybody]) for name in own[0]}
    weights = torch.stack([weight.reshape(()) for _, weight in everybody])
    seen = Seen(torch.tensor([True, False, False]), torch.zeros(3, dtype=torch.long), weights)
    forged, _ = Attack("little").forged(stacked, weights, seen)
    return {name: tree.take(part, 0) for name, part in forged.items()}, own[1]


TAMPERING: dict[str, Callable[[bytes], bytes]] = {
    "nan": _edited(lambda leaf: leaf * float("nan")),
    "shape": _edited(lambda leaf: leaf[:1]),
    "garbage": lambda blob: blob[: len(blob) // 2] + b"not what you think",
    "huge": _edited(lambda leaf: torch.full_like(leaf, 1e30)),
    "weight": _heavy,
    **{kind: _forged(kind) for kind in COUNTS if kind != "little"},
}


def _impostor(content: RecordDict) -> RecordDict:
    head, blobs = unpack(content)
    return pack(head | {"client": 0}, blobs)


def _with(content: RecordDict, blob: bytes, spoil: Callable[[Any], None]) -> RecordDict:
    """The answer with another blob, and a Flower array around it that is not what it should be."""
    record = RecordDict({**content, "fedge.blobs": ArrayRecord({"0": Array("uint8", (len(blob),), "fedge", blob)})})
    spoil(record.array_records["fedge.blobs"]["0"])
    return record


def _bomb(array: Any) -> None:
    """Half a megabyte that Flower puts together to 4 GB: an array that names its chunk 8,000 times."""
    array.__dict__["_chunks"] = array.slice_array() * 8_000


def _malformed(array: Any) -> None:
    """An array whose description says nothing of its chunks; the SuperLink, which looks at heads alone, takes it."""
    kind, chunks, _ = array.deflate().partition(b"\0")[0].split(b" ")
    array.__dict__["deflate"] = lambda: b"%s %s 2\0{}" % (kind, chunks)


ANSWERS: dict[str, Callable[[RecordDict], RecordDict]] = {
    "bomb": lambda content: _with(content, bytes(500_000), _bomb),
    "malformed": lambda content: _with(content, b"malformed", _malformed),
    "impostor": _impostor,
}


def _held(folder: Path) -> None:
    """A file `push-ROUND` lets the SuperLink be killed in the middle of that round's sending, once.

    An object is stored, `pushing` says so and waits until somebody removes it; then the object is sent again, as Flower
    does when the SuperLink died before it could confirm.
    """
    real, records = http_grid.push_objects, folder.parent / "run/rounds.jsonl"

    def wanted() -> Path:
        done = len(records.read_text().splitlines()) if records.exists() else 0
        return folder / f"push-{done + 1}"

    def push(objects: Any, push_object_fn: Any, **options: Any) -> None:
        def unconfirmed(name: str, content: bytes) -> None:
            push_object_fn(name, content)
            if (path := wanted()).exists():
                path.rename(folder / "pushing")
                while (folder / "pushing").exists():
                    time.sleep(0.05)
                push_object_fn(name, content)

        real(objects, push_object_fn=unconfirmed, max_concurrent_pushes=1, **options)

    http_grid.push_objects = push


def server() -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = context.run_config
        _held(Path(os.environ[FOLDER]))
        serve(
            grid,
            algorithm(),
            federation(),
            deadline=float(config["deadline"]),
            wait=float(config["wait"]),
            keys=str(config["keys"]),
            rounds=int(os.environ[ROUNDS]),
            seed=SEED,
            out=str(config["out"]),
            resume=bool(config["resume"]),
            say=lambda line: print(f"fedge: {line}", flush=True),
        )

    return app
