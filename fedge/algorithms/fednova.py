"""FedNova: Wang, Liu, Liang, Joshi and Poor, Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization, NeurIPS 2020."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedge import tree
from fedge.algorithms import schedule
from fedge.algorithms.local import LocalTraining, check_settings, ranged
from fedge.algorithms.optimisers import SGD
from fedge.core import Algorithm, Ask, Carry, Flow, Loss, Model, Params, Payload, Range, Task
from fedge.handle import by_target

State = dict[str, Any]


@dataclass(frozen=True, eq=False)
class FedNova(Algorithm[State]):
    """FedAvg with normalised updates, so that clients who take more steps do not count for more (Eq. 6).

        w_k     = E epochs of local SGD with momentum rho,  from w_t
        d_k     = (w_t - w_k) / a_k,   a_k = the sum of the coefficients of client k's gradients in (w_t - w_k) / lr
        w_{t+1} = w_t - server_lr * tau_eff * sum_k p_k d_k,   tau_eff = sum_k p_k a_k,   p_k = n_k / sum_k n_k

    For plain SGD a_k is tau_k, the number of steps. With momentum it is (tau_k - rho (1 - rho^tau_k) / (1 - rho)) /
    (1 - rho) (Sec. 4.1). With steps that shrink (`lr_decay`, `inner_decay` as in FedAvg) every coefficient shrinks
    with them. With `server_momentum` the server's step is one of SGD with momentum. `clip` is as in FedAvg. If all
    clients have the same a_k, this is FedAvg.

    Bytes per round, d parameters of b bytes, cohort c: down c d b, up c (d b + b + 4); with lr_decay < 1 also down c b.
    """

    model: nn.Module
    lr: float = 0.1
    lr_decay: float = 1.0
    inner_decay: float = 1.0
    epochs: int = 5
    batch_size: int | None = 15
    momentum: float = 0.0
    weight_decay: float = 0.0
    server_lr: float = 1.0
    server_momentum: float = 0.0
    clip: float | None = None
    loss: Loss = by_target

    def __post_init__(self) -> None:
        check_settings(self)

    def tasks(self, model: Model) -> Mapping[str, Task]:
        def upload(sent: Payload, carry: Carry) -> Payload:
            steps = carry["length"]
            moved = tree.sub(sent["params"], carry["params"])
            return {"direction": tree.scale(1 / steps, moved), "steps": {"sum": steps}}

        steps = Range("steps", 0.0, math.inf, most=self._local().longest, shrunk=schedule.factor)
        return ranged(self._local().tasks("train", model, upload), steps)

    def _local(self) -> LocalTraining:
        rule = SGD(self.momentum, self.weight_decay)
        size = (self.lr, self.epochs, self.batch_size)
        return LocalTraining(rule, *size, self.clip, self.inner_decay, measured=True)

    def init(self, params: Params) -> State:
        return {"params": params, "server": self._server().start(params), **schedule.begin(self.lr_decay)}

    def adopt(self, state: State) -> State:
        return schedule.begin(self.lr_decay) | state

    def _server(self) -> SGD:
        return SGD(self.server_momentum)

    def round(self, state: State) -> Flow[State]:
        send = {"params": state["params"], **schedule.part(self.lr_decay, state)}
        trained = yield Ask(self._local().asked("train"), send)
        downhill = tree.scale(trained.mean["steps"]["sum"], trained.mean["direction"])
        params, moments = self._server().step(state["params"], downhill, state["server"], self.server_lr)
        return {"params": params, "server": moments, **schedule.after(self.lr_decay, state)}
