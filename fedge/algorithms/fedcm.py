"""FedCM: Xu, Wang, Wang and Yao, FedCM: Federated Learning with Client-level Momentum, 2021."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedge import tree
from fedge.algorithms import schedule, server
from fedge.algorithms.local import LocalTraining, check_settings, ranged
from fedge.algorithms.optimisers import SGD
from fedge.algorithms.server import Served
from fedge.checks import positive
from fedge.core import Algorithm, Ask, Carry, Flow, Loss, Model, Params, Payload, Range, Task
from fedge.handle import by_target

State = dict[str, Any]
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, eq=False)
class FedCM(Algorithm[State]):
    """FedAvg whose clients mix the last round's mean direction into every local step.

        w_k     = E epochs of steps  w <- w - lr (alpha g + (1 - alpha) Delta_t + weight_decay w),  from w_t
        w_{t+1} = w_t + server_lr * sum_k n_k (w_k - w_t) / sum_k n_k,  or another server step
        Delta_{t+1} = sum_k n_k (w_t - w_k) / sum_k n_k L_k,   L_k = the sum of client k's step sizes,  Delta_0 = 0

    With equal step sizes and numbers of steps Delta is the mean update per local step, as in the paper. L_k is one
    number per client, which keeps it so if clients or step sizes differ. `lr_decay`, `inner_decay`, `clip` and
    `server_...` are as in FedAvg. What is clipped is the mixture. Delta is that of the clients under any server step.
    alpha = 1 is FedAvg.

    Bytes per round, d parameters of b bytes, cohort c: down 2 c d b, up c (d b + b + 4); with lr_decay < 1 also
    down c b.
    """

    model: nn.Module
    lr: float = 0.1
    alpha: float = 0.1
    lr_decay: float = 1.0
    inner_decay: float = 1.0
    epochs: int = 5
    batch_size: int | None = 15
    weight_decay: float = 0.0
    server_lr: float = 1.0
    server_momentum: float = 0.0
    server_optimiser: Served = "sgd"
    server_betas: tuple[float, float] = (0.9, 0.99)
    server_eps: float = 1e-3
    server_lr_decay: float = 1.0
    server_warmup: int = 0
    clip: float | None = None
    loss: Loss = by_target

    def __post_init__(self) -> None:
        check_settings(self)
        server.check(self)
        positive("alpha", self.alpha)
        if self.alpha > 1:
            raise ValueError(f"alpha is {self.alpha}, it must be at most 1 (1 is FedAvg)")

    def tasks(self, model: Model) -> Mapping[str, Task]:
        def shares(sent: Payload) -> Params:
            """alpha as a tensor: a step that is compiled for one value then serves all."""
            return {"alpha": next(iter(sent["params"].values())).new_full((), self.alpha)}

        def mixed(sent: Payload, held: Params, params: Params, grad: Params) -> Params:
            alpha = held["alpha"]
            return tree.axpy(1 - alpha, sent["direction"], tree.scale(alpha, grad))

        def upload(sent: Payload, carry: Carry) -> Payload:
            length = {"sum": self.lr * carry["length"]}
            return {"delta": tree.sub(carry["params"], sent["params"]), "length": length}

        tasks = self._local().tasks("train", model, upload, hold=shares, bend=mixed)
        # TINY is the least that numbers of single precision can be divided by.
        length = Range("length", TINY, math.inf, most=self._longest, least=self._shortest, shrunk=schedule.factor)
        return ranged(tasks, length)

    def _longest(self, examples: Tensor) -> Tensor:
        return self.lr * self._local().longest(examples)

    def _shortest(self, sent: Payload, examples: Tensor) -> Tensor:
        """How long a client's whole path is at least: steps shrink evenly within a round, to `inner_decay`.

        A mean length that is too short by more than a share alpha makes the direction grow from round to round.
        """
        factor = schedule.factor(sent)
        path = self._longest(examples) * (1 + self.inner_decay) / 2
        return path if factor is None else path * factor

    def _local(self) -> LocalTraining:
        rule = SGD(weight_decay=self.weight_decay)
        size = (self.lr, self.epochs, self.batch_size)
        return LocalTraining(rule, *size, self.clip, self.inner_decay, measured=True)

    def init(self, params: Params) -> State:
        return {"params": params, "direction": tree.zeros_like(params), **server.begin(self, params)}

    def adopt(self, state: State) -> State:
        return server.begin(self, state["params"]) | state

    def round(self, state: State) -> Flow[State]:
        w = state["params"]
        send = {"params": w, "direction": state["direction"], **schedule.part(self.lr_decay, state)}
        trained = yield Ask(self._local().asked("train"), send)
        delta, length = trained.mean["delta"], trained.mean["length"]["sum"]
        return {**server.step(self, state, delta), "direction": tree.scale(-1 / length, delta)}
