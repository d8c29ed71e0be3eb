"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

With a server optimiser it is FedOpt: Reddi et al., Adaptive Federated Optimization, ICLR 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from fedge import tree
from fedge.algorithms import schedule
from fedge.algorithms.local import SGD, Adam, Moments, Optimiser, clipped
from fedge.checks import at_least_one, choice, non_negative, positive, unit_interval
from fedge.core import Algorithm, Ask, Batch, Carry, Flow, Loss, Model, Params, Payload, Task
from fedge.handle import cross_entropy

State = dict[str, Any]


@dataclass(frozen=True, eq=False)
class FedAvg(Algorithm[State]):
    """E epochs of local steps on every client, then the weighted mean of the updates (Eq. 1: weights n_k / n).

        delta_k = w_k - w_t after E epochs of batches of B with the local optimiser
        w_{t+1} = server step along  sum_k n_k delta_k / sum_k n_k

    The server step is w + server_lr * mean by default (FedAvg is server_lr = 1); with `server_momentum` or
    `server_optimiser="adam"` the negative mean is the gradient of SGD with momentum or Adam. The local step size is
    lr * lr_decay^t; with `clip`, a local gradient that is longer is shortened to it.

    Bytes a round, d parameters of b bytes, cohort c: down c d b, up c (d b + 4); with lr_decay < 1 also down c b.
    """

    model: nn.Module
    lr: float = 0.1
    lr_decay: float = 1.0
    epochs: int = 5
    batch_size: int | None = 15
    momentum: float = 0.0
    weight_decay: float = 0.0
    optimiser: Literal["sgd", "adam"] = "sgd"
    server_lr: float = 1.0
    server_momentum: float = 0.0
    server_optimiser: Literal["sgd", "adam"] = "sgd"
    server_betas: tuple[float, float] = (0.9, 0.99)
    server_eps: float = 1e-3
    clip: float | None = None
    loss: Loss = cross_entropy

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        schedule.check(self.lr_decay)
        positive("clip", self.clip, optional=True)
        positive("server_lr", self.server_lr)
        positive("server_eps", self.server_eps)
        at_least_one("epochs", self.epochs)
        at_least_one("batch_size", self.batch_size, optional=True)
        unit_interval("momentum", self.momentum)
        unit_interval("server_momentum", self.server_momentum)
        non_negative("weight_decay", self.weight_decay)
        choice("optimiser", self.optimiser, ("sgd", "adam"))
        choice("server_optimiser", self.server_optimiser, ("sgd", "adam"))
        for beta in self.server_betas:
            unit_interval("server_betas", beta)
        if self.optimiser == "adam" and self.momentum:
            raise ValueError(f"momentum is {self.momentum}, but local Adam has its own: leave it at 0")
        if self.server_optimiser == "adam" and self.server_momentum:
            raise ValueError(f"server_momentum is {self.server_momentum}, but server Adam has its own: leave it at 0")

    def tasks(self, model: Model) -> Mapping[str, Task]:
        local = self._local()

        def start(sent: Payload) -> Carry:
            return sent["params"], local.start(sent["params"])

        def step(sent: Payload, carry: Carry, batch: Batch) -> Carry:
            params, moments = carry
            return local.step(params, clipped(self.clip, model.grad(params, batch)), moments, sent)

        def finish(sent: Payload, carry: Carry, examples: Tensor) -> tuple[Payload, Tensor]:
            return {"delta": tree.sub(carry[0], sent["params"])}, examples.float()

        return {"train": Task(start, step, finish, self.epochs, self.batch_size)}

    def init(self, params: Params) -> State:
        return {"params": params, "server": self._server().start(params), **schedule.begin(self.lr_decay)}

    def adopt(self, state: State) -> State:
        return schedule.begin(self.lr_decay) | state

    def round(self, state: State) -> Flow[State]:
        trained = yield Ask("train", {"params": state["params"], **schedule.part(self.lr_decay, state)})
        downhill = tree.scale(-1.0, trained.mean["delta"])
        params, moments = self._server().step(state["params"], downhill, state["server"])
        return {"params": params, "server": moments, **schedule.after(self.lr_decay, state)}

    def _local(self) -> Optimiser:
        if self.optimiser == "adam":
            return Adam(self.lr, self.weight_decay)
        return SGD(self.lr, self.momentum, self.weight_decay)

    def _server(self) -> Optimiser:
        if self.server_optimiser == "adam":
            return Adam(self.server_lr, betas=self.server_betas, eps=self.server_eps)
        return SGD(self.server_lr, self.server_momentum)


__all__ = ["FedAvg", "Moments"]
