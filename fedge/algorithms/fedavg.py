"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

With a server optimiser it is FedOpt: Reddi et al., Adaptive Federated Optimization, ICLR 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from fedge import tree
from fedge.algorithms import schedule
from fedge.algorithms.local import LocalTraining, check_settings
from fedge.algorithms.optimisers import SGD, Adam, Moments, Optimiser, has_momentum
from fedge.algorithms.spectral import Spectral
from fedge.checks import choice, positive, unit_interval
from fedge.core import Algorithm, Ask, Carry, Flow, Loss, Model, Params, Payload, Task
from fedge.handle import cross_entropy

State = dict[str, Any]
Name = Literal["sgd", "adam", "spectral"]


@dataclass(frozen=True, eq=False)
class FedAvg(Algorithm[State]):
    """E epochs of local steps on every client, then the weighted mean of the updates (Eq. 1: weights n_k / n).

        delta_k = w_k - w_t after E epochs of batches of B with the local optimiser
        w_{t+1} = server step along  sum_k n_k delta_k / sum_k n_k

    The server step is w + server_lr * mean by default (FedAvg is server_lr = 1); with `server_momentum` or another
    `server_optimiser` the negative mean is the gradient of SGD with momentum, Adam or a spectral step. The local step
    size is lr * lr_decay^t and falls linearly to inner_decay times that within a round; with `clip`, a local gradient
    that is longer is shortened to it.

    An optimiser is an object, SGD(...), Adam(...) or Spectral(...), or its name. A name goes with the fields here:
    "sgd" with `momentum` and `weight_decay`, "adam" with `weight_decay`, "spectral" with both (momentum 0.95 unless it
    is given); at the server "sgd" and "spectral" with `server_momentum`, "adam" with `server_betas` and `server_eps`.

    With `carry_momentum` local momentum does not start at zero: clients upload their last, and its weighted mean is
    where the next cohort starts.

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
    server_optimiser: Name | SGD | Adam | Spectral | Optimiser = "sgd"
    server_betas: tuple[float, float] = (0.9, 0.99)
    server_eps: float = 1e-3
    clip: float | None = None
    inner_decay: float = 1.0
    carry_momentum: bool = False
    loss: Loss = cross_entropy

    def __post_init__(self) -> None:
        check_settings(self)
        positive("server_eps", self.server_eps)
        for beta in self.server_betas:
            unit_interval("server_betas", beta)
        self._check_optimisers()

    def _check_optimisers(self) -> None:
        local = {"momentum": self.momentum, "weight_decay": self.weight_decay}
        _check_optimiser("optimiser", self.optimiser, local)
        _check_optimiser("server_optimiser", self.server_optimiser, {"server_momentum": self.server_momentum})
        if self.optimiser == "adam" and self.momentum:
            raise ValueError(f"momentum is {self.momentum}, but local Adam has its own: leave it at 0")
        if self.server_optimiser == "adam" and self.server_momentum:
            raise ValueError(f"server_momentum is {self.server_momentum}, but server Adam has its own: leave it at 0")
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
        return {"params": params, "server": self._server().start(params), **carried, **schedule.begin(self.lr_decay)}

    def adopt(self, state: State) -> State:
        carried = {"momentum": tree.zeros_like(state["params"])} if self.carry_momentum else {}
        return carried | schedule.begin(self.lr_decay) | state

    def round(self, state: State) -> Flow[State]:
        carried = {"momentum": state["momentum"]} if self.carry_momentum else {}
        send = {"params": state["params"], **carried, **schedule.part(self.lr_decay, state)}
        trained = yield Ask(self._local().asked("train"), send)
        downhill = tree.scale(-1.0, trained.mean["delta"])
        params, moments = self._server().step(state["params"], downhill, state["server"], self.server_lr)
        kept = {name: trained.mean[name] for name in carried}
        return {"params": params, "server": moments, **kept, **schedule.after(self.lr_decay, state)}

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
        return SGD(self.momentum, self.weight_decay)

    def _server(self) -> Optimiser:
        if not isinstance(self.server_optimiser, str):
            return self.server_optimiser
        if self.server_optimiser == "adam":
            return Adam(self.server_betas, self.server_eps)
        if self.server_optimiser == "spectral":
            return Spectral.server(self.server_momentum)
        return SGD(self.server_momentum)


def _check_optimiser(name: str, value: Any, beside: Mapping[str, float]) -> None:
    """A name, or an object that nothing beside it contradicts."""
    if not isinstance(value, Optimiser):
        return choice(name, value, get_args(Name))
    for field, given in beside.items():
        if given:
            raise ValueError(f"{field} is {given}, but {name}={type(value).__name__}(...) has its own: leave it at 0")


__all__ = ["FedAvg", "Moments"]
