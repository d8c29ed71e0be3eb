"""The drill's experiment, and devices that misbehave on request: a file says which client does what in which round."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import http_grid

import fedge
from fedge.deploy import client_app, serve
from fedge.deploy.envelope import pack, unpack
from fedge.engine.links import wire

SEED = 3
FOLDER = "FEDGE_DRILL"  # environment: where the requests lie, one file `CLIENT-ROUND` with the name of the fault
CLIENTS, ROUNDS = "FEDGE_DRILL_CLIENTS", "FEDGE_DRILL_ROUNDS"  # environment: how many there are
NOW = ""  # the fault of this message


def federation() -> fedge.Federation:
    data, clients = fedge.data.load("digits"), int(os.environ[CLIENTS])
    return fedge.Federation(data, fedge.partition.dirichlet(data.train_y, clients, alpha=1.0, seed=0))


def _loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if NOW == "raises":
        raise ZeroDivisionError("a sensor gave nothing")
    if NOW == "dies":
        os._exit(137)  # as the kernel ends it when memory is short
    if NOW == "ended":
        os.kill(os.getpid(), signal.SIGTERM)  # as a service manager, or whoever watches the memory, does first
        time.sleep(3600)
    if NOW == "hangs":
        time.sleep(3600)
    return fedge.cross_entropy(logits, y)


def algorithm() -> fedge.FedDANE:
    return fedge.FedDANE(fedge.models.mlp(64, (16,), 10, seed=1), lr=0.05, mu=0.1, epochs=1, batch_size=40, loss=_loss)


def load(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    fed = federation()
    mine = fed.examples(client)
    return fed.data.train_x[mine], fed.data.train_y[mine]


def client() -> ClientApp:
    """The real app with the faults around it; hello and keep are its own."""
    real, app = client_app(algorithm(), load), ClientApp()
    app.query("hello")(real)

    @app.train("work")
    def work(message: Message, context: Context) -> Message:
        global NOW
        head, _ = unpack(message.content)
        path = Path(os.environ[FOLDER]) / f"{context.node_config['partition-id']}-{head['at'][1]}"
        NOW = path.read_text() if path.exists() else ""
        reply = real(message, context)
        return _tampered(reply, message) if NOW in TAMPERING else reply

    return app


def _tampered(reply: Message, message: Message) -> Message:
    head, blobs = unpack(reply.content)
    return Message(pack(head, {name: TAMPERING[NOW](blob) for name, blob in blobs.items()}), reply_to=message)


def _edited(edit: Any) -> Any:
    def change(blob: bytes) -> bytes:
        answer = wire.decode(blob)
        for uploads in answer.values():
            for upload, _ in uploads:
                for part in upload.values():
                    first = next(iter(part))
                    part[first] = edit(part[first])
        return wire.encode(answer)

    return change


TAMPERING = {
    "nan": _edited(lambda leaf: leaf * float("nan")),
    "shape": _edited(lambda leaf: leaf[:1]),
    "garbage": lambda blob: blob[: len(blob) // 2] + b"not what you think",
}


def _held(folder: Path) -> None:
    """A file `push-ROUND` lets the SuperLink be killed in the middle of that round's sending, once.

    An object is stored, `pushing` says so and waits until somebody removes it; then the object is sent again, as Flower
    does when the SuperLink died before it could confirm.
    """
    real, records = http_grid.push_objects, folder.parent / "run/rounds.jsonl"

    def wanted() -> bool:
        done = len(records.read_text().splitlines()) if records.exists() else 0
        return (folder / f"push-{done + 1}").exists()

    def push(objects: Any, push_object_fn: Any, **options: Any) -> None:
        def unconfirmed(name: str, content: bytes) -> None:
            push_object_fn(name, content)
            for path in folder.glob("push-*") if wanted() else ():
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
            rounds=int(os.environ[ROUNDS]),
            seed=SEED,
            out=str(config["out"]),
            resume=bool(config["resume"]),
            say=lambda line: print(f"fedge: {line}", flush=True),
        )

    return app
