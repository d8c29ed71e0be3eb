"""A Newton step in the span of the mean update and the last steps, after local training.

A small distributed form of the subspace methods: Conn, Gould, Sartenaer and Toint, On iterated-subspace minimization
methods for nonlinear optimization, 1996; Martens and Grosse, Optimizing Neural Networks with Kronecker-factored
Approximate Curvature, ICML 2015, Sec. 7, for the pair {update, last step} and the exact matrix in their span.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedge import tree
from fedge.algorithms import schedule
from fedge.algorithms.lbfgs import combine, gram
from fedge.algorithms.local import LocalTraining, check_settings
from fedge.algorithms.optimisers import SGD
from fedge.algorithms.passes import average, losses_at, lowest
from fedge.checks import at_least_zero, choice, non_negative
from fedge.core import Algorithm, Ask, Batch, Carry, Flow, Loss, Model, Params, Payload, Task
from fedge.handle import by_target

State = dict[str, Any]
UPDATE, LAST = "update", "last_"  # the parts that the basis travels as
LONGEST = 10.0  # times the mean update, of a step


@dataclass(frozen=True, eq=False)
class SubspaceNewton(Algorithm[State]):
    """FedAvg whose server step is a damped Newton step in the span of a few vectors, with the cohort's own curvature.

        u = sum_k n_k (w_k - w_t) / sum_k n_k  after E epochs of local SGD
        V = [u, s_{t-1}, ..., s_{t-memory}]    the mean update and the last steps, d x k
        g = V^T grad F(c),  G = V^T B(c) V     at the centre c = w_t + u ("update") or w_t ("start"), cohort means
        a = -(G + damping diag G)^{-1} g       for each of the `dampings`
        w_{t+1} = the best of w_t + u and c + V a, by the cohort's losses; no step is longer than 10 |u|

    B is the Gauss-Newton or the empirical Fisher matrix (`matrix`); no d x d matrix is formed, and clients need k
    forward-mode passes and no backward pass. FedAvg's own point w_t + u is always a candidate, so in no round is the
    cohort's loss above FedAvg's. With memory 0 this is a line search along u. With `weight_decay` the penalty is in the
    local steps, in g and G, and in the losses.

    The record of a round has `step_update` and `step_last`: how many times u and s_{t-1} are in the step (FedAvg: 1 and
    0), and `candidate`: 0 if FedAvg's point was best, i if the i-th damping was.

    Bytes per round, d parameters of b bytes, cohort c, k = 1 + min(t, memory), q dampings:
        down c d b + c k d b + c (q + 1) k b,  up c (d b + 4) + c ((k^2 + k) b + 4) + c ((q + 1) b + 4);
        with lr_decay < 1 also down c b.
    """

    model: nn.Module
    lr: float = 0.1
    lr_decay: float = 1.0
    inner_decay: float = 1.0
    epochs: int = 5
    batch_size: int | None = 15
    momentum: float = 0.0
    weight_decay: float = 0.0
    memory: int = 1
    centre: Literal["update", "start"] = "update"
    matrix: Literal["gauss_newton", "fisher"] = "gauss_newton"
    dampings: tuple[float, ...] = (0.0, 0.1, 1.0, 10.0)
    clip: float | None = None
    loss: Loss = by_target

    def __post_init__(self) -> None:
        check_settings(self)
        at_least_zero("memory", self.memory)
        choice("centre", self.centre, ("update", "start"))
        choice("matrix", self.matrix, ("gauss_newton", "fisher"))
        if not self.dampings:
            raise ValueError("dampings is empty: without one there is no step but FedAvg's")
        for damping in self.dampings:
            non_negative("dampings", damping)

    # -- clients

    def tasks(self, model: Model) -> Mapping[str, Task]:
        def upload(sent: Payload, carry: Carry) -> Payload:
            return {UPDATE: tree.sub(carry["params"], sent["params"])}

        return {
            **self._local().tasks("train", model, upload),
            "curvature": average("span", self._in_span(model), zeros=_zeros),
            "losses": losses_at(model, lambda sent: _points(sent["params"], _basis(sent), sent["candidates"]["at"])),
        }

    def _local(self) -> LocalTraining:
        rule = SGD(self.momentum, self.weight_decay)
        return LocalTraining(rule, self.lr, self.epochs, self.batch_size, self.clip, self.inner_decay)

    def _in_span(self, model: Model) -> Any:
        def total(sent: Payload, batch: Batch) -> Params:
            basis = _basis(sent)
            centre = tree.add(sent["params"], sent[UPDATE]) if self.centre == "update" else sent["params"]
            slopes, matrix = model.sum_in_span(centre, batch, basis, self.matrix)
            return {"gradient": slopes, "matrix": matrix}

        return total

    # -- server

    def init(self, params: Params) -> State:
        return {"params": params, "steps": [], "chosen": {}, **schedule.begin(self.lr_decay)}

    def adopt(self, state: State) -> State:
        return schedule.begin(self.lr_decay) | state

    def round(self, state: State) -> Flow[State]:
        w = state["params"]
        trained = yield Ask(self._local().asked("train"), {"params": w, **schedule.part(self.lr_decay, state)})
        basis = [trained.mean[UPDATE], *state["steps"]]
        names = (UPDATE, *(f"{LAST}{place}" for place in range(1, len(basis))))
        curved = yield Ask("curvature", dict(zip(names, basis, strict=True)), reuse=("params",))
        coefficients = self._candidates(curved.mean["span"], w, basis)
        like = next(iter(w.values()))
        asked = {"candidates": {"at": coefficients.to(like.device, like.dtype)}}
        tried = yield Ask("losses", asked, reuse=("params", *names))
        best = lowest(tried.mean["losses"]["at"], _points(w, basis, coefficients), self.weight_decay)
        step = combine(basis, coefficients[best])
        steps = [step, *state["steps"]][: self.memory]
        after = {"params": tree.add(w, step), "steps": steps, "chosen": _said(best, coefficients[best])}
        return {**after, **schedule.after(self.lr_decay, state)}

    def _candidates(self, span: Params, w: Params, basis: list[Params]) -> Tensor:
        """The coefficients of V that are tried, [q + 1, k], the first of them FedAvg's."""
        slopes, matrix = span["gradient"].double().cpu(), span["matrix"].double().cpu()
        fedavg = torch.zeros_like(slopes)
        fedavg[0] = 1.0
        offset = fedavg if self.centre == "update" else torch.zeros_like(slopes)
        dots = gram([*basis, w])
        if self.weight_decay:
            matrix = matrix + self.weight_decay * dots[:-1, :-1]
            slopes = slopes + self.weight_decay * (dots[:-1, -1] + dots[:-1, :-1] @ offset)
        steps = (offset + newton(slopes, matrix, damping) for damping in self.dampings)
        return torch.stack([fedavg, *(bounded(step, dots[:-1, :-1]) for step in steps)])

    def notes(self, state: State) -> dict[str, Any]:
        return dict(state["chosen"])


def newton(slopes: Tensor, matrix: Tensor, damping: float) -> Tensor:
    """-(G + damping diag G)^+ g; vectors without curvature, such as zero ones, are left out.

    The matrix is scaled to a unit diagonal first, so that the lengths of the basis vectors do not matter.
    """
    curved = matrix.diagonal() > 0
    root = torch.where(curved, matrix.diagonal(), 1.0).sqrt()
    scaled = (matrix + matrix.mT) / 2 / torch.outer(root, root) + damping * torch.eye(len(root), dtype=root.dtype)
    right = torch.where(curved, slopes / root, 0.0)
    solved = torch.linalg.pinv(scaled, rtol=1e-10, hermitian=True) @ right
    return torch.where(curved, -solved / root, 0.0)


def bounded(coefficients: Tensor, dots: Tensor) -> Tensor:
    """V a, made no longer than `LONGEST` times u: where few clients answer, lies can take nearly all curvature away."""
    most, length = LONGEST * dots[0, 0].sqrt(), (coefficients @ dots @ coefficients).clamp(min=0).sqrt()
    return coefficients * (most / length) if length > most else coefficients


def _basis(sent: Payload) -> list[Params]:
    """u and the last steps, as far as they were sent."""
    steps = sum(name.startswith(LAST) for name in sent)
    return [sent[UPDATE], *(sent[f"{LAST}{place}"] for place in range(1, steps + 1))]


def _zeros(sent: Payload) -> Params:
    like, k = next(iter(sent["params"].values())), len(_basis(sent))
    return {"gradient": like.new_zeros(k), "matrix": like.new_zeros(k, k)}


def _points(w: Params, basis: list[Params], coefficients: Tensor) -> list[Params]:
    """w + V c for each row c."""
    found = []
    for row in coefficients.unbind():
        point = w
        for c, vector in zip(row.unbind(), basis, strict=True):
            point = tree.axpy(c.to(next(iter(w.values()))), vector, point)
        found.append(point)
    return found


def _said(best: int, coefficients: Tensor) -> dict[str, Any]:
    named = dict(zip(("step_update", "step_last"), coefficients.tolist(), strict=False))
    return {"candidate": best, **named}
