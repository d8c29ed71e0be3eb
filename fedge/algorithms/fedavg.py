"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

With a server optimiser it is FedOpt: Reddi et al., Adaptive Federated Optimization, ICLR 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from fedge import tree
from fedge.algorithms import schedule, server
from fedge.algorithms.kronecker import SOAP, Shampoo
from fedge.algorithms.local import LocalTraining, check_settings
from fedge.algorithms.optimisers import SGD, Adam, Moments, Optimiser, has_momentum
from fedge.algorithms.server import Served
from fedge.algorithms.spectral import Spectral
from fedge.core import Algorithm, Ask, Carry, Flow, Loss, Model, Params, Payload, Task
from fedge.handle import by_target

State = dict[str, Any]
Name = Literal["sgd", "adam", "spectral", "spectral_fast"]


@dataclass(frozen=True, eq=False)
class FedAvg(Algorithm[State]):
    """E epochs of local steps on every client, then the weighted mean of the updates (Eq. 1: weights n_k / n).

        delta_k = w_k - w_t after E epochs of batches of B with the local optimiser
        w_{t+1} = server step along  sum_k n_k delta_k / sum_k n_k

    The server step is w + server_lr * mean by default (FedAvg is server_lr = 1). With `server_momentum` or another
    `server_optimiser` the negative mean is the gradient of SGD with momentum, Adam, a spectral step, Shampoo or SOAP.
    Its size is server_lr * server_lr_decay^t; in the first `server_warmup` rounds it grows evenly up to that. The local
    step size is lr * lr_decay^t, and falls linearly to inner_decay times that within a round. With `clip`, local
    gradients that are longer are shortened to this length.

    An optimiser is an object, SGD(...), Adam(...) or Spectral(...), at the server also Shampoo(...) or SOAP(...); or it
    is a name. A name takes its settings from the fields here. On clients, "sgd" has `momentum` and `weight_decay`,
    "adam" has `weight_decay`, "spectral" and its cheapest form "spectral_fast" have both (momentum 0.95 unless it is
    given). At the server, "sgd" and "spectral" have `server_momentum`, "adam" has `server_betas` and `server_eps`,
    "shampoo" and "soap" have `server_momentum` and the second of `server_betas`.

    With `carry_momentum` local momentum does not start at zero: clients upload their last momentum, and the next cohort
    starts from its weighted mean.

    Bytes per round, d parameters of b bytes, cohort c: down c d b, up c (d b + 4); with lr_decay < 1 also down c b;
    with carry_momentum down 2 c d b, up c (2 d b + 4).
    """

    model: nn.Module
    lr: float = 0.1
    lr_decay: float = 1.0
    epochs: int = 5
    batch_size: int | None = 15
    momentum: float = 0.0
    weight_decay: float = 0.0
    optimiser: Name | SGD | Adam | Spectral | Optimiser = "sgd"
    server_lr: float = 1.0
    server_momentum: float = 0.0
    server_optimiser: Served = "sgd"
    server_betas: tuple[float, float] = (0.9, 0.99)
    server_eps: float = 1e-3
    server_lr_decay: float = 1.0
    server_warmup: int = 0
    clip: float | None = None
    inner_decay: float = 1.0
    carry_momentum: bool = False
    loss: Loss = by_target

    def __post_init__(self) -> None:
        check_settings(self)
        server.check(self)
        local = {"momentum": self.momentum, "weight_decay": self.weight_decay}
        server.check_optimiser("optimiser", self.optimiser, local, get_args(Name))
        if isinstance(self.optimiser, Shampoo | SOAP):
            name = type(self.optimiser).__name__
            raise ValueError(f"optimiser is {name}(...), whose steps are a server's: give it as server_optimiser")
        if self.optimiser == "adam" and self.momentum:
            raise ValueError(f"momentum is {self.momentum}, but local Adam has its own: leave it at 0")
        if self.carry_momentum and not has_momentum(self._rule()):
            raise ValueError("carry_momentum is true, but there is none: use SGD with momentum, or spectral steps")

    def tasks(self, model: Model) -> Mapping[str, Task]:
        def upload(sent: Payload, carry: Carry) -> Payload:
            parts = {"delta": tree.sub(carry["params"], sent["params"])}
            return parts | {"momentum": carry["moments"]["v"]} if self.carry_momentum else parts

        def carried(sent: Payload) -> Moments:
            return {"v": sent["momentum"]}

        start = carried if self.carry_momentum else None
        return self._local().tasks("train", model, upload, bend=self._bend, moments=start)

    def _bend(self, sent: Payload, held: Params, params: Params, grad: Params) -> Params:
        """The gradient of the local problem, for algorithms that change it."""
        return grad

    def init(self, params: Params) -> State:
        carried = {"momentum": tree.zeros_like(params)} if self.carry_momentum else {}
        return {"params": params, **server.begin(self, params), **carried}

    def adopt(self, state: State) -> State:
        carried = {"momentum": tree.zeros_like(state["params"])} if self.carry_momentum else {}
        return carried | server.count(self) | state

    def round(self, state: State) -> Flow[State]:
        carried = {"momentum": state["momentum"]} if self.carry_momentum else {}
        send = {"params": state["params"], **carried, **schedule.part(self.lr_decay, state)}
        trained = yield Ask(self._asked(), send)
        return {**server.step(self, state, trained.mean["delta"]), **{name: trained.mean[name] for name in carried}}

    def _asked(self) -> tuple[str, ...]:
        """The tasks of a round, one after another."""
        return self._local().asked("train")

    def _local(self) -> LocalTraining:
        return LocalTraining(self._rule(), self.lr, self.epochs, self.batch_size, self.clip, self.inner_decay)

    def _rule(self) -> Optimiser:
        """The clients' optimiser."""
        if not isinstance(self.optimiser, str):
            return self.optimiser
        if self.optimiser == "adam":
            return Adam(weight_decay=self.weight_decay)
        if self.optimiser == "spectral":
            return Spectral(self.momentum or Spectral.momentum, weight_decay=self.weight_decay)
        if self.optimiser == "spectral_fast":
            return Spectral.fast(self.momentum or Spectral.momentum, self.weight_decay)
        return SGD(self.momentum, self.weight_decay)


__all__ = ["FedAvg", "Moments"]
