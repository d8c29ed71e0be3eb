"""L-BFGS on the server with curvature from the clients' Fisher information (Alg. 1).

Liu, Zhu and Yu, Resource-constrained Federated Edge Learning with Heterogeneous Data: Formulation and Analysis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from fedge import tree
from fedge.algorithms import schedule
from fedge.algorithms.lbfgs import direction, is_safe, named_shape
from fedge.algorithms.local import LocalTraining
from fedge.algorithms.optimisers import SGD
from fedge.algorithms.passes import PASS_BATCH, average, losses_at, lowest
from fedge.checks import at_least_one, choice, non_negative, positive
from fedge.core import Algorithm, Ask, Batch, Carry, Flow, Loss, Model, Params, Payload, Range, Task
from fedge.handle import by_target

State = dict[str, Any]
SQUARES = Range("diagonal", 0.0, math.inf)
PRODUCTS = ("fisher", "gauss_newton", "squared_slopes")
_COUNTS = {"accepted": 0, "refused": 0, "shape": {}}


@dataclass(frozen=True, eq=False)
class FisherLBFGS(Algorithm[State]):
    """w_{t+1} = w_t - lr H_t g_t, with H_t from m curvature pairs whose y is a Fisher product, not a difference.

        g_t = n_k-weighted mean over the cohort of
                source "gradient": grad F_k(w_t), over all batches or over `batches` random ones, plus weight_decay w_t
                source "update":   w_t - w_k after E epochs of local SGD with step local_lr * lr_decay^t, local
                                   gradients that are longer than `clip` shortened to it
        s_t = w_{t+1} - w_t
        y_t = B_t s_t + weight_decay s_t + damping s_t
                curvature "diagonal": B_t = diag E[grad f_i grad f_i^T] (Eq. 9), uploaded beside g_t: one phase
                curvature "product":  B_t s_t with the whole empirical Fisher (Eq. 9) or Gauss-Newton matrix (Eq. 8),
                                      never formed: a second phase sends s_t to the same cohort
        H_t = two-loop recursion over the last m pairs (see `lbfgs`); before the first pair, first_step I

    `matrix` is "fisher" or "gauss_newton". "batch_square" is a cheap, biased stand-in for the diagonal that squares
    mini-batch gradients. "squared_slopes" is line 4 of ClientUpdate as it is printed, J^T diag(Gamma) J, in the product
    form: J is the Jacobian of the logits, and Gamma has the squared derivatives of the loss by the logits.
    `curvature_at="next"` takes B at w_{t+1} over the next cohort: s_t is sent with the parameters and one phase is
    saved. `candidates`: the cohort is asked for its loss at w_t + a lr p_t for each a, and the best is taken (a phase
    of a few scalars). `dampings`: the same for one direction per damping, each sent as a whole; pairs keep `damping`. A
    pair without safely positive curvature (s.y <= floor s.s) is refused. `direction="diagonal"` is a control without
    pairs: p_t = -(B_t + weight_decay + damping)^{-1} g_t with the diagonal B_t.

    Alg. 1 iterates "while global model no converge" with one cohort. Every iteration needs the cohort's gradient at a
    new point, so it is one of our rounds with its bytes. We draw a cohort for each.

    The record of a round says whether the curvature acts: `cos_sy` = cos(s, y) and `length_sy` = |y| / |s| of the pair
    that was taken, `cos_step` = cos(p, -g) and `length_step` = |p| / |g|, `accepted_pairs` and `refused_pairs` so
    far. If both cosines are near 1 and the lengths are constant, H is nearly a multiple of the identity: the method is
    then FedAvg with another server step.

    Bytes per round, d parameters of b bytes, cohort c:
        diagonal: down c d b, up c (2 d b + 8);  product: down 2 c d b, up 2 c (d b + 4) (at "next" all in one phase,
        the first round without the product);  with q candidates also down c d b, up c (q b + 4);
        with q dampings, as soon as they differ, also down q c d b, up c (q b + 4);  with lr_decay < 1 also down c b.
    """

    model: nn.Module
    epochs: int = 5
    batch_size: int | None = 15
    lr: float = 1.0
    source: Literal["update", "gradient"] = "update"
    curvature: Literal["diagonal", "product"] = "diagonal"
    matrix: Literal["fisher", "gauss_newton", "squared_slopes", "batch_square"] = "fisher"
    curvature_at: Literal["same", "next"] = "same"
    memory: int = 10
    damping: float = 1.0
    weight_decay: float = 0.0
    local_lr: float = 0.1
    lr_decay: float = 1.0
    first_step: float | None = None
    batches: int | None = None
    candidates: tuple[float, ...] = ()
    dampings: tuple[float, ...] = ()
    direction: Literal["pairs", "diagonal"] = "pairs"
    floor: float = 1e-8
    clip: float | None = None
    loss: Loss = by_target

    def __post_init__(self) -> None:
        for name in ("epochs", "memory"):
            at_least_one(name, getattr(self, name))
        at_least_one("batch_size", self.batch_size, optional=True)
        for name in ("lr", "local_lr"):
            positive(name, getattr(self, name))
        for name in ("damping", "weight_decay", "floor"):
            non_negative(name, getattr(self, name))
        positive("clip", self.clip, optional=True)
        choice("source", self.source, ("update", "gradient"))
        choice("curvature", self.curvature, ("diagonal", "product"))
        choice("curvature_at", self.curvature_at, ("same", "next"))
        known = ("fisher", "batch_square") if self.curvature == "diagonal" else PRODUCTS
        choice("direction", self.direction, ("pairs", "diagonal"))
        choice(f"matrix (with curvature {self.curvature!r})", self.matrix, known)
        schedule.check(self.lr_decay)
        self._check_optional()

    def _check_optional(self) -> None:
        if self.lr_decay != 1 and self.source == "gradient":
            raise ValueError(f"lr_decay is {self.lr_decay}, but it shrinks local steps: set source='update'")
        if self.clip is not None and self.source == "gradient":
            raise ValueError(f"clip is {self.clip}, but it is for local steps: set source='update'")
        if self.first_step is not None:
            positive("first_step", self.first_step)
        if self.batches is not None:
            at_least_one("batches", self.batches)
            if self.source == "update":
                raise ValueError(f"batches is {self.batches}, but it limits the gradient: set source='gradient'")
        for candidate in self.candidates:
            positive("candidates", candidate)
        for damping in self.dampings:
            non_negative("dampings", damping)
        if self.candidates and self.dampings:
            raise ValueError(f"candidates is {self.candidates} and dampings is {self.dampings}: choose by one of them")
        if self.direction == "diagonal" and self.curvature != "diagonal":
            raise ValueError(f"direction is 'diagonal', but curvature is {self.curvature!r}: set curvature='diagonal'")

    # -- clients

    def tasks(self, model: Model) -> Mapping[str, Task]:
        return {
            **self._train(model),
            "gradient": average("grad", self._gradient(model), **self._batches()),
            "diagonal": self._squares(model),
            "product": average("product", self._product(model), **self._batches()),
            "losses": losses_at(model, lambda sent: self._points(sent["params"], sent)),
        }

    def _squares(self, model: Model) -> Task:
        about: dict[str, Any] = {"ranges": (SQUARES,), "squares": ("diagonal",)}
        return average("diagonal", self._diagonal(model), **about, **self._batches())

    def _batches(self) -> dict[str, Any]:
        """A pass over everything, or over `batches` of the size that was asked for."""
        if self.batches is None and self.matrix != "batch_square":
            return {"batch_size": PASS_BATCH}
        return {"batch_size": self.batch_size, "batches": self.batches}

    def _train(self, model: Model) -> Mapping[str, Task]:
        def upload(sent: Payload, carry: Carry) -> Payload:
            return {"grad": tree.sub(sent["params"], carry["params"])}

        rule = SGD(weight_decay=self.weight_decay)
        local = LocalTraining(rule, self.local_lr, self.epochs, self.batch_size, self.clip)
        return local.tasks("train", model, upload)

    def _gradient(self, model: Model) -> Any:
        return lambda sent, batch: tree.scale(batch.examples, model.grad(sent["params"], batch))

    def _diagonal(self, model: Model) -> Any:
        if self.matrix == "fisher":
            return lambda sent, batch: model.sum_sq_grad(sent["params"], batch)

        def square(sent: Payload, batch: Batch) -> Params:
            grad = model.grad(sent["params"], batch)
            return tree.scale(batch.examples, tree.mul(grad, grad))

        return square

    def _product(self, model: Model) -> Any:
        known = (model.sum_fisher_product, model.sum_gauss_newton_product, model.sum_squared_slope_product)
        times = dict(zip(PRODUCTS, known, strict=True)).get(self.matrix, known[0])
        return lambda sent, batch: times(sent["params"], batch, sent["s"])

    def _points(self, w: Params, sent: Payload) -> list[Params]:
        if self.dampings:
            return [tree.axpy(self.lr, sent[f"p_{i}"], w) for i in range(len(self.dampings))]
        return [tree.axpy(a * self.lr, sent["p"], w) for a in self.candidates]

    # -- server

    def init(self, params: Params) -> State:
        return {"params": params, "pairs": [], "last": None, **_COUNTS, **schedule.begin(self.lr_decay)}

    def adopt(self, state: State) -> State:
        return {**_COUNTS, **schedule.begin(self.lr_decay), **state}

    def round(self, state: State) -> Flow[State]:
        w, pairs = state["params"], list(state["pairs"])
        counts = {name: state.get(name, start) for name, start in _COUNTS.items()} | {"shape": {}}
        next_point = self.curvature_at == "next"
        gathered = yield self._ask(w, state["last"], schedule.part(self.lr_decay, state))
        g = gathered.mean["grad"]
        if self.source == "gradient" and self.weight_decay:
            g = tree.axpy(self.weight_decay, w, g)
        if next_point and self.direction == "pairs" and state["last"] is not None:
            self._count(counts, self._offer(pairs, state["last"], self._times(gathered.mean, state["last"])), pairs)
        p, length, damping = yield from self._step(w, g, pairs, gathered.mean)
        counts["shape"] |= {**damping, **named_shape("step", tree.scale(-1.0, g), p)}
        s = tree.scale(length, p)
        if not next_point and self.direction == "pairs":
            curved = gathered
            if self.curvature == "product":
                curved = yield Ask("product", {"s": s}, reuse=("params",))
            self._count(counts, self._offer(pairs, s, self._times(curved.mean, s)), pairs)
        after = {"pairs": pairs, "last": s if next_point else None, **counts}
        return {"params": tree.add(w, s), **after, **schedule.after(self.lr_decay, state)}

    def _step(
        self, w: Params, g: Params, pairs: list[Any], mean: Payload
    ) -> Flow[tuple[Params, float, dict[str, float]]]:
        """The direction, its length, and the damping for the record, after the cohort's losses if there is a choice."""
        if self.dampings and (pairs or self.direction == "diagonal"):
            send = {f"p_{i}": self._damped(pairs, g, mean, damping) for i, damping in enumerate(self.dampings)}
        else:
            send = {"p": self._damped(pairs, g, mean, self.damping)}
            if not self.candidates:
                return send["p"], self.lr, {}
        tried = yield Ask("losses", send, reuse=("params",))
        best = lowest(tried.mean["losses"]["at"], self._points(w, send), self.weight_decay)
        if self.dampings:
            return send[f"p_{best}"], self.lr, {"damping": float(self.dampings[best])}
        return send["p"], self.lr * self.candidates[best], {}

    def _damped(self, pairs: list[Any], g: Params, mean: Payload, damping: float) -> Params:
        """The direction with this damping; the pairs that are kept have `self.damping`."""
        if self.direction == "diagonal":
            shift = self.weight_decay + damping
            return tree.map_(lambda slope, diagonal: -slope / (diagonal.clamp(min=0.0) + shift), g, mean["diagonal"])
        if damping != self.damping:
            moved = [(s, tree.axpy(damping - self.damping, s, y)) for s, y in pairs]
            pairs = [pair for pair in moved if is_safe(pair, self.floor)]
        return self._direction(pairs, g)

    def _ask(self, w: Params, last: Params | None, shrunk: Payload) -> Ask:
        """Phase one: the gradient or update, and whatever curvature can be had with it."""
        first = "train" if self.source == "update" else "gradient"
        if self.curvature == "diagonal":
            return Ask((first, "diagonal"), {"params": w, **shrunk})
        if self.curvature_at == "next" and last is not None:
            return Ask((first, "product"), {"params": w, "s": last, **shrunk})
        return Ask(first, {"params": w, **shrunk})

    def _times(self, mean: Payload, s: Params) -> Params:
        """B s, from the diagonal or as it came back; squares that a codec has changed may be below 0."""
        if self.curvature == "product":
            return mean["product"]
        return tree.map_(lambda diagonal, one: diagonal.clamp(min=0.0) * one, mean["diagonal"], s)

    def _offer(self, pairs: list[Any], s: Params, bs: Params) -> int:
        """Take the pair into the memory, oldest out; returns 1 if it was refused."""
        y = tree.axpy(self.weight_decay + self.damping, s, bs)
        if not is_safe((s, y), self.floor):
            return 1
        pairs.append((s, y))
        del pairs[: -self.memory]
        return 0

    def _direction(self, pairs: list[Any], g: Params) -> Params:
        if pairs:
            return direction(pairs, g)
        if self.first_step is not None:
            return tree.scale(-self.first_step, g)
        return tree.scale(-1.0 if self.source == "update" else -1 / max(1.0, float(tree.norm(g))), g)

    def _count(self, counts: dict[str, Any], refused: int, pairs: list[Any]) -> None:
        counts["refused"] += refused
        counts["accepted"] += 1 - refused
        if not refused:
            counts["shape"] |= named_shape("sy", *pairs[-1])

    def notes(self, state: State) -> dict[str, Any]:
        counted = {f"{name}_pairs": state.get(name, 0) for name in ("accepted", "refused")}
        return {**counted, **state.get("shape", {})}
