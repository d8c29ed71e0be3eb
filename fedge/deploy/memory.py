"""What a device remembers between messages, in Flower's `context.state`.

Parts held in this round, what its tasks remember from round to round (by algorithm), and shared examples. Flower keeps
the state as long as the node lives; a node that was restarted begins with what `Task.first` says.
"""

from __future__ import annotations

from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context
from torch import Tensor

from fedge.core import At
from fedge.engine.clients.worker import Worker
from fedge.engine.links import wire
from fedge.inputs import Inputs

HELD, SHARED, TOKEN, MEMORY = "fedge.held", "fedge.shared", "fedge.token", "fedge.memory"


def remember(context: Context, label: str, run: str, worker: Worker) -> None:
    """Every message may start a process of its own, so what the worker holds goes through bytes."""
    _put(context, HELD, {"label": label, "round": worker.round, "held": worker.held})
    memory = worker.memory
    if memory.tables or memory.written:
        written = [[list(one.at), list(one.jobs), one.parts] for one in memory.written]
        _put(context, f"{MEMORY}.{label}", {"run": run, "final": memory.state(), "written": written})


def recall(context: Context, label: str, run: str, worker: Worker) -> None:
    """Give a fresh worker what its predecessor held; of another algorithm it holds nothing."""
    found = _get(context, HELD)
    if found is not None and found["label"] == label:
        worker.round, worker.held = found["round"], found["held"]
    remembered = _get(context, f"{MEMORY}.{label}")
    if remembered is not None and remembered["run"] == run:
        worker.memory.load(remembered["final"])
        for at, jobs, parts in remembered["written"]:
            worker.memory.put(At(*at), [(int(client), int(row)) for client, row in jobs], parts)


def keep_shared(context: Context, token: str, blob: bytes) -> None:
    context.state[SHARED] = _array(blob)
    context.state[TOKEN] = ConfigRecord({"token": token})


def shared_token(context: Context) -> str | None:
    return str(context.state.config_records[TOKEN]["token"]) if TOKEN in context.state else None


def shared(context: Context) -> tuple[Inputs, Tensor]:
    """The shared examples, x and y."""
    found = _get(context, SHARED)
    return found["x"], found["y"]


def _put(context: Context, name: str, value: Any) -> None:
    context.state[name] = _array(wire.encode(value))


def _get(context: Context, name: str) -> Any:
    if name not in context.state:
        return None
    return wire.decode(context.state.array_records[name]["bytes"].data)


def _array(blob: bytes) -> ArrayRecord:
    return ArrayRecord({"bytes": Array("uint8", (len(blob),), "fedge", blob)})
