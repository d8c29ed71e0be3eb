"""FedDANE: Li et al., FedDANE: A Federated Newton-Type Method, Asilomar 2019."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from fedge import tree
from fedge.algorithms import schedule
from fedge.algorithms.local import LocalTraining, check_settings
from fedge.algorithms.optimisers import SGD
from fedge.algorithms.passes import average
from fedge.checks import choice, non_negative
from fedge.core import Algorithm, Ask, Batch, Carry, Flow, Loss, Model, Params, Payload, Task
from fedge.handle import by_target

State = dict[str, Any]


@dataclass(frozen=True, eq=False)
class FedDANE(Algorithm[State]):
    """Two phases per round: the cohort's gradient, then local problems that are corrected by it.

        g_t     = sum_k n_k grad F_k(w_t) / sum_k n_k
        w_k     = E epochs of SGD on F_k(w) + <g_t - grad F_k(w_t), w - w_t> + mu/2 |w - w_t|^2
        w_{t+1} = w_t + sum_k n_k (w_k - w_t) / sum_k n_k

    The paper's text draws a new cohort for the second phase; its released code keeps the first. `cohort` chooses; the
    default is to keep it. A client keeps its own gradient between the phases; one of a new cohort computes it first.
    With `clip`, gradients of the local problem that are longer are shortened to this length.

    Bytes per round, d parameters of b bytes, cohort c: down 2 c d b, up 2 c (d b + 4); with a new cohort down 3 c d b;
    with lr_decay < 1 (the local step size is lr * lr_decay^t, and falls to inner_decay times that within a round) also
    down c b.
    """

    model: nn.Module
    lr: float = 0.1
    lr_decay: float = 1.0
    epochs: int = 5
    batch_size: int | None = 15
    mu: float = 0.1
    cohort: Literal["same", "new"] = "same"
    clip: float | None = None
    inner_decay: float = 1.0
    loss: Loss = by_target

    def __post_init__(self) -> None:
        check_settings(self)
        non_negative("mu", self.mu)
        choice("cohort", self.cohort, ("same", "new"))

    def tasks(self, model: Model) -> Mapping[str, Task]:
        def total(sent: Payload, batch: Batch) -> Params:
            return tree.scale(batch.examples, model.grad(sent["params"], batch))

        def correction(sent: Payload) -> Params:
            return tree.sub(sent["mean_grad"], sent["grad"])

        def corrected(sent: Payload, correction: Params, params: Params, grad: Params) -> Params:
            return tree.add(grad, tree.axpy(self.mu, tree.sub(params, sent["params"]), correction))

        def upload(sent: Payload, carry: Carry) -> Payload:
            return {"delta": tree.sub(carry["params"], sent["params"])}

        return {
            "gradient": average("grad", total, keeps=("grad",)),
            "anchor": average("grad", total, keeps=("grad",), private=True),
            **self._local().tasks("solve", model, upload, hold=correction, bend=corrected),
        }

    def _local(self) -> LocalTraining:
        return LocalTraining(SGD(), self.lr, self.epochs, self.batch_size, self.clip, self.inner_decay)

    def init(self, params: Params) -> State:
        return {"params": params, **schedule.begin(self.lr_decay)}

    def adopt(self, state: State) -> State:
        return schedule.begin(self.lr_decay) | state

    def round(self, state: State) -> Flow[State]:
        w = state["params"]
        gathered = yield Ask("gradient", {"params": w})
        g, shrunk = gathered.mean["grad"], schedule.part(self.lr_decay, state)
        if self.cohort == "new":
            tasks = self._local().asked("anchor", "solve")
            solved = yield Ask(tasks, {"params": w, "mean_grad": g, **shrunk}, cohort="new")
        else:
            solved = yield Ask(self._local().asked("solve"), {"mean_grad": g, **shrunk}, reuse=("params", "grad"))
        return {"params": tree.add(w, solved.mean["delta"]), **schedule.after(self.lr_decay, state)}
