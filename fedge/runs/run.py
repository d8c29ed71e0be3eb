"""A run: what training leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from fedge import tree
from fedge.core import Algorithm, Params, Payload, S
from fedge.evaluate import scores
from fedge.handle import Handle
from fedge.inputs import Inputs, cast, to
from fedge.ledger import Ledger
from fedge.losses import is_cross_entropy
from fedge.problem import Problem
from fedge.runs import export
from fedge.runs.given import misfit, read

Record = dict[str, Any]
ABSURD = 1000.0


@dataclass(frozen=True)
class Kept(Generic[S]):
    """The state after a round that is kept, and how good it was, the larger the better."""

    round: int
    value: float
    state: S


@dataclass(repr=False)
class Run(Generic[S]):
    """What training left: the server's state, one record per round, and every byte."""

    algorithm: Algorithm[S]
    state: S
    handle: Handle
    history: list[Record] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    memory: Record = field(default_factory=dict)  # what simulated clients remember, to go on from
    memory_bytes: int | None = (
        0  # what that takes; None on a fleet, whose devices keep it, over all clients that took part
    )
    stopped: bool = False
    way_back: str = ""  # how to go on from the last checkpoint that was of use, if that is not the newest
    ended: str = ""  # why it was enough before all rounds were done: what `until` said
    example: Inputs = None  # one input as the model takes it, [1, ...], all zeros
    kept: Kept[S] | None = None  # the best round, with Observe(keep="best")
    problem: Problem = field(default_factory=Problem)  # what its answers are
    classes: tuple[str, ...] = ()  # what the classes are called, in the order of the scores, if the data say it

    def __repr__(self) -> str:
        last = next((r for r in reversed(self.history) if "test_loss" in r), {})
        key = "accuracy" if "test_accuracy" in last else "loss"
        value = last.get(f"test_{key}")
        accuracy = "" if value is None else f", test {key} {value:.3f} after round {last['round']}"
        moved = self.ledger.total()
        megabytes = f"{moved['up'] / 1e6:.1f} MB up, {moved['down'] / 1e6:.1f} MB down"
        end = ", diverged" if self.diverged else ""
        rounds = f"{self.rounds} round{'s' * (self.rounds != 1)}"
        return f"Run({type(self.algorithm).__name__}, {rounds}{accuracy}, {megabytes}{end})"

    @property
    def diverged(self) -> str | None:
        """Why this run is of no use, None if it is: its last test loss is not finite, or absurd."""
        last = next((record for record in reversed(self.history) if "test_loss" in record), None)
        if last is None or not has_diverged(last, absurd(self.algorithm)):
            return None
        loss = "not finite" if last["test_loss"] is None else f"{last['test_loss']:.3g}"
        what = f"it diverged: the test loss of round {last['round']} is {loss}"
        scale = ", or train on targets of mean 0 and deviation 1" if "test_mse" in last else ""
        return f"{what}; lower the step size, or clip{scale}{self.way_back}"

    @property
    def rounds(self) -> int:
        return len(self.history)

    @property
    def best(self) -> Run[S]:
        """This run as it was after its best round, with Observe(keep="best"); what clients remember is not kept."""
        if self.kept is None:
            raise ValueError('no best round was kept: train with Observe(keep="best"), keep = "best" in a file')
        return replace(self, state=self.kept.state, history=self.history[: self.kept.round], memory={}, kept=None)

    @property
    def device(self) -> torch.device:
        """Where the trained parameters are."""
        return next(iter(self.params.values())).device

    @property
    def params(self) -> Params:
        """The trained parameters by the module's own names."""
        return self.algorithm.params(self.state)

    def scores(self, x: Inputs | ArrayLike) -> Tensor:
        """[N, ...] -> [N, classes], or what the model puts out, on the device of the parameters."""
        like = next(iter(self.params.values()))
        given = to(cast(read(x, self.example), like.dtype), like.device)
        try:
            found = scores(self.algorithm, self.handle, self.state, given)
        except Exception as error:
            if (why := misfit(given, self.example)) is None:
                raise
            raise ValueError(why) from error
        if self.problem.kind == "classes" and found.dim() != 2 and (why := misfit(given, self.example)):
            raise ValueError(why)
        return found

    def predict(self, x: Inputs | ArrayLike) -> Tensor | NDArray[np.str_]:
        """[N, ...] -> [N], the label with the largest score; tokens [N, T]; of a regression the outputs.

        Labels are those of your data, whatever numbers they have inside; words come in a NumPy array. Labels that hold
        or not (loss `bce`) are 1 where their logit is above 0.
        """
        return self.problem.predictions(self.scores(x))

    def module(self, client: int | None = None) -> nn.Module:
        """The trained network as a plain module on the CPU, with the names of yours; it needs no fedge.

        FedOVA's gives one score per class. With `client`, the one with that client's personal layers.
        """
        memory = None if client is None else self._remembered(client)
        return self.algorithm.network(self.state, memory)

    def _remembered(self, client: int) -> Payload:
        """What a client remembers, for algorithms without rows."""
        found: Payload = {}
        for part, table in self.memory.items():
            place = (table["jobs"][:, 0] == client).nonzero().flatten()
            if len(place) == 1:
                found[part] = {name: leaf[place[0]] for name, leaf in table["leaves"].items()}
        if self.memory and not found:
            known = sorted({int(one) for table in self.memory.values() for one in table["jobs"][:, 0]})
            raise export.ExportError(
                f"client {client} never took part, so it has nothing of its own: choose one of {known}"
            )
        return found

    def save(self, path: Path | str, client: int | None = None) -> Path:
        """Write the trained network as `module` gives it: .safetensors, .pt, .onnx or .pt2; the suffix decides."""
        return export.save(self.module(client), Path(path), self.example, self.classes)

    def summary(self) -> Record:
        """The result in a few numbers; final is the mean over the last tenth of the rounds, 20 at most."""
        last = max(1, min(20, self.rounds // 10))
        moved, wire = self.ledger.total(), self.ledger.wire() or {}
        return {
            "rounds": self.rounds,
            "diverged": self.diverged,
            "final_accuracy": _mean(_series(self.history[-last:], "test_accuracy")),
            "final_rounds": last,
            **({} if self.kept is None else {"best_round": self.kept.round}),
            "best_accuracy": max(_series(self.history, "test_accuracy"), default=None),
            "final_loss": _mean(_series(self.history[-last:], "test_loss")),
            "final_train_accuracy": _mean(_series(self.history[-last:], "train_accuracy")),
            "up_bytes": moved["up"],
            "down_bytes": moved["down"],
            "broadcast_bytes": moved["broadcast"],
            "wire_up_bytes": wire.get("up"),
            "wire_down_bytes": wire.get("down"),
            "seconds": sum(record["seconds"] for record in self.history),
            "dropped": sum(len(record["dropped"]) for record in self.history),
            "parameters": tree.size(self.params),
            "client_memory_bytes": self.memory_bytes,
            "virtual_seconds": _total(_series(self.history, "virtual_seconds")),
            "joules": _total(_series(self.history, "joules")),
        } | ({"ended": self.ended} if self.ended else {})


def absurd(algorithm: Algorithm[Any]) -> float:
    """A loss that says that a run has diverged: of cross-entropy, whose value for guessing is log(classes)."""
    loss = getattr(algorithm.loss, "loss", algorithm.loss)  # FedOVA's weighs one of two sides
    return ABSURD if is_cross_entropy(loss) else math.inf


def has_diverged(record: Record, limit: float) -> bool:
    """Whether a round was evaluated and its test loss is not finite (in a file that is null), or over the limit.

    Of a regression the limit says nothing: the squared error of prices may be any number.
    """
    loss = record.get("test_loss", 0.0)
    return loss is None or not math.isfinite(loss) or ("test_mse" not in record and loss > limit)


def _series(history: list[Record], name: str) -> list[float]:
    return [record[name] for record in history if record.get(name) is not None]


def _total(values: list[float]) -> float | None:
    return sum(values) if values else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
