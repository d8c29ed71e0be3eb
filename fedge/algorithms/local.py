"""Local training: E epochs of steps from the parameters that were sent. One task for every algorithm that has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from fedge.algorithms import schedule
from fedge.algorithms.optimisers import SGD, Moments, Optimiser, clipped
from fedge.checks import at_least_one, non_negative, positive, unit_interval
from fedge.core import Batch, Carry, Model, Params, Payload, Range, Task

PACE = "pace"  # the task, and the part that it leaves with the client

Upload = Callable[[Payload, Carry], Payload]
Bend = Callable[[Payload, Params, Params, Params], Params]  # sent, held, parameters, gradient -> gradient


def _nothing(sent: Payload) -> Params:
    return {}


def _straight(sent: Payload, held: Params, params: Params, grad: Params) -> Params:
    return grad


SETTINGS: dict[str, Callable[[str, Any], None]] = {
    "lr": positive,
    "lr_decay": lambda name, value: schedule.check(value, name),
    "inner_decay": lambda name, value: schedule.check(value, name),
    "epochs": at_least_one,
    "batch_size": lambda name, value: at_least_one(name, value, optional=True),
    "momentum": unit_interval,
    "weight_decay": non_negative,
    "clip": lambda name, value: positive(name, value, optional=True),
    "server_lr": positive,
    "server_lr_decay": lambda name, value: schedule.check(value, name),
    "server_momentum": unit_interval,
}


def check_settings(algorithm: Any) -> None:
    """Refuse impossible values of the fields that algorithms with local training share, as far as this one has them."""
    for one in fields(algorithm):
        if one.name in SETTINGS:
            SETTINGS[one.name](one.name, getattr(algorithm, one.name))


@dataclass(frozen=True)
class LocalTraining:
    """Steps i = 0, 1, ..., n - 1 of the optimiser over the batches of E epochs, from sent["params"].

        g_i = bend(gradient at w_i), shortened to `clip`
        w_{i+1} = optimiser's step along g_i of size  lr * (round's factor) * (1 - (1 - inner_decay) i / (n - 1))

    With inner_decay < 1 a client needs its own n in advance: a first, private task ("pace") works it out from the
    number of its examples and keeps it; nothing more is sent. `measured` adds up what the sizes of the steps are times
    lr; with momentum rho, whose steps repeat earlier gradients, step i counts 1 + rho + ... + rho^i times. lr itself
    is in the update alone: there a recorded step takes it as an input, and one compiled step serves them all.
    """

    optimiser: Optimiser
    lr: float
    epochs: int
    batch_size: int | None
    clip: float | None = None
    inner_decay: float = 1.0
    measured: bool = False

    def asked(self, *names: str) -> tuple[str, ...]:
        """The tasks to ask for, where the training is among `names`."""
        return names if self.inner_decay == 1 else (PACE, *names)

    def tasks(
        self,
        name: str,
        model: Model,
        upload: Upload,
        *,
        hold: Callable[[Payload], Params] = _nothing,
        bend: Bend = _straight,
        moments: Callable[[Payload], Moments] | None = None,
    ) -> dict[str, Task]:
        """The training under this name, and what has to go before it.

        `upload` makes the upload from what was sent and from the carry at the end: its params, moments and, if
        measured, length. `hold` is computed once, for `bend`; `moments` replaces the optimiser's own start.
        """

        def start(sent: Payload) -> Carry:
            params = sent["params"]
            state = self.optimiser.start(params) if moments is None else moments(sent)
            return {"params": params, "moments": state, "held": hold(sent), **self._counters(params)}

        def step(sent: Payload, carry: Carry, batch: Batch) -> Carry:
            params = carry["params"]
            grad = clipped(self.clip, bend(sent, carry["held"], params, model.grad(params, batch)))
            factor = self._factor(sent, carry)
            params, state = self.optimiser.step(params, grad, carry["moments"], self.lr, factor)
            return {"params": params, "moments": state, "held": carry["held"], **self._counted(carry, factor)}

        def finish(sent: Payload, carry: Carry, examples: Tensor) -> tuple[Payload, Tensor]:
            return upload(sent, carry), examples.float()

        train = {name: Task(start, step, finish, self.epochs, self.batch_size)}
        return train if self.inner_decay == 1 else {PACE: self._pace(), **train}

    def longest(self, examples: Tensor) -> Tensor:
        """What `measured` adds up to at most, for clients with these numbers of examples."""
        size = examples if self.batch_size is None else self.batch_size
        return self.epochs * (examples / size).ceil() / (1 - self._momentum)

    def _counters(self, params: Params) -> dict[str, Tensor]:
        like = next(iter(params.values()))
        names = {"taken": self.inner_decay != 1, "length": self.measured, "reach": self.measured and self._momentum > 0}
        return {name: like.new_zeros(()) for name, needed in names.items() if needed}

    @property
    def _momentum(self) -> float:
        return self.optimiser.momentum if isinstance(self.optimiser, SGD) else 0.0

    def _counted(self, carry: Carry, factor: Tensor | None) -> dict[str, Tensor]:
        found = {"taken": carry["taken"] + 1} if "taken" in carry else {}
        if self.measured:
            size: float | Tensor = 1.0 if factor is None else factor
            if "reach" in carry:
                found["reach"] = 1 + self._momentum * carry["reach"]
                size = size * found["reach"]
            found["length"] = carry["length"] + size
        return found

    def _factor(self, sent: Payload, carry: Carry) -> Tensor | None:
        """What shrinks this step: the round's factor, the place within the round, both, or nothing."""
        round = schedule.factor(sent)
        if self.inner_decay == 1:
            return round
        inner: Tensor = 1 - sent[PACE]["fall"] * carry["taken"]
        return inner if round is None else round * inner

    def _pace(self) -> Task:
        """How much the step size falls from one step to the next; from one example, so at the cost of nothing."""

        def start(sent: Payload) -> Carry:
            return next(iter(sent["params"].values())).new_zeros(())

        def step(sent: Payload, carry: Carry, batch: Batch) -> Carry:
            return carry + batch.examples

        def finish(sent: Payload, carry: Carry, examples: Tensor) -> tuple[Payload, Tensor]:
            size = examples if self.batch_size is None else self.batch_size
            steps = self.epochs * ((examples + (size - 1)) // size)
            fall = (1 - self.inner_decay) / (steps - 1).clamp(min=1).to(carry.dtype)
            return {PACE: {"fall": fall}}, examples.float()

        return Task(start, step, finish, batch_size=1, batches=1, keeps=(PACE,), private=True)


def ranged(tasks: Mapping[str, Task], *ranges: Range) -> dict[str, Task]:
    """The same tasks, where what "train" uploads has these ranges."""
    return {**tasks, "train": replace(tasks["train"], ranges=ranges)}
