"""Asynchronous training: the server moves whenever enough answers are there, and nobody is waited for.

FedBuff: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022.
FedAsync: Xie, Koyejo and Gupta, Asynchronous Federated Optimization, OPT 2020.

Around FedOVA every class has a version and a buffer of its own: a class moves when its own buffer is full, so common
classes do not wait for rare ones. `Averaged` around it judges the mean of its late rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedge import tree
from fedge.algorithms import server
from fedge.algorithms.averaged import Averaged
from fedge.algorithms.fedavg import FedAvg
from fedge.algorithms.fedova import FedOVA
from fedge.algorithms.optimisers import SGD
from fedge.algorithms.shared_ova import SharedOVA
from fedge.algorithms.wrapper import Wrapper
from fedge.checks import at_least_one, non_negative
from fedge.core import Algorithm, Ask, Flow, Params, Payload, Reply

Array = NDArray[Any]
State = dict[str, Any]  # "models": the inner state of every row; "events": what is under way


class Arrivals(NamedTuple):
    """The uploads of a full buffer, [K, ...]: parts, what each started from, weights, and how many versions ago."""

    upload: Payload
    start: Params  # empty unless the algorithm `needs_start`
    weights: Tensor
    staleness: Tensor


class Asynchronous(Wrapper[State]):
    """An algorithm whose server does not wait; it needs a clock (`fedge.edge`), which says who answers when.

    `inner` is FedAvg or FedProx, or FedOVA around one of them. Each of its models is a row; one model is one row.
    """

    buffer: int
    staleness: float
    needs_start: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least_one("buffer", self.buffer)
        non_negative("staleness", self.staleness)
        base = self.inner.inner if isinstance(self.inner, FedOVA) else self.inner
        if not isinstance(base, FedAvg) or isinstance(base, SharedOVA):
            raise TypeError(
                f"{type(self).__name__} is around {type(base).__name__}, it needs FedAvg or FedProx, or FedOVA "
                "around one of them: asynchronous servers add up updates"
            )

    @property
    def base(self) -> FedAvg:
        """What trains one row."""
        return cast(FedAvg, self.inner.inner if isinstance(self.inner, FedOVA) else self.inner)

    @property
    def rows(self) -> int | None:
        return self.inner.classes if isinstance(self.inner, FedOVA) else None

    def init(self, params: Params) -> State:
        return {"models": [self.base.init(params) for _ in range(self.rows or 1)], "events": None}

    def adopt(self, state: State) -> State:
        return {**state, "models": [self.base.adopt(one) for one in state["models"]]}

    def setup(self, state: State) -> Flow[State]:
        return Algorithm.setup(self, state)

    def round(self, state: State) -> Flow[State]:
        raise ValueError(
            f"{type(self).__name__} needs to know who answers when: put a fedge.edge.Clock around the link, or add a "
            "table [edge] to the experiment"
        )

    def check_run(self, rounds: int, cohort: int, sampling: str) -> None:
        """Refuse cohorts, which nobody draws here, and a buffer that all answers of a run together do not fill."""
        if sampling != "fixed":
            raise ValueError(
                f"sampling is {sampling!r}, but {type(self).__name__} draws no cohorts: {cohort} clients are at work "
                "at any time; leave sampling out"
            )
        if self.buffer > (most := rounds * cohort):
            each = f"; each of the {self.rows} classes has a buffer of its own" if self.rows else ""
            raise ValueError(
                f"buffer is {self.buffer}, but {rounds} rounds of {cohort} clients are {most} answers, so it never "
                f"fills and the model never moves{each}: lower buffer, or raise rounds or cohort"
            )

    def asks(self, model: Any) -> Ask:
        """What a client that starts now is asked and sent, for one row."""
        flow = self.base.round(model)
        found = next(flow)
        flow.close()
        assert isinstance(found, Ask)
        return found

    def moved(self, model: Any, arrivals: Arrivals) -> Any:
        """One row after the server's step with a full buffer."""
        flow = self.base.round(model)
        next(flow)
        mean = self._mean(arrivals, self.base.params(model))
        try:
            flow.send(Reply(mean, torch.tensor(len(arrivals.weights))))
        except StopIteration as end:
            return end.value
        raise AssertionError("a round of FedAvg has one phase")

    @cached_property
    def adds_up(self) -> bool:
        """Whether the server's step is a plain sum, so that many steps in a row are one product of matrices."""
        base = self.base
        plain = server.rule(base) == SGD() and type(base).round is FedAvg.round
        return plain and not server.count(base) and not base.carry_momentum

    def mixing(self, sizes: list[int], weights: Array, staleness: Array) -> Array:
        """M [steps, K]: after step i of several full buffers of these sizes the model is  w + sum_k M[i, k] d_k.

        d_k is what `moves` gives for upload k, and w the model before all of them. M[i, k] depends on the steps from
        that of k to i alone, so rows that move one after another are blocks of the M of all their steps.
        """
        raise NotImplementedError

    def moves(self, arrivals: Arrivals, now: Params) -> Params:
        """Where each upload would move the model, [K, ...]; `now` is one model, or one for each upload."""
        raise NotImplementedError

    def after(self, met: Params, added: Params, arrivals: Arrivals, mixing: Tensor, out: Params) -> None:
        """Writes the parameters after some of the steps, [steps, ...], by the rows of `mixing` that belong to them.

        `met` is the model w that the arrivals meet and `added` the one that steps are added to: the same for all, or
        one for each arrival and step, where `mixing` has a block for each of several models.
        """
        for name, moves in self.moves(arrivals, met).items():
            flat = out[name].view(len(mixing), -1)
            torch.mm(mixing.to(moves.device, moves.dtype), moves.reshape(len(moves), flat.shape[1]), out=flat)
            out[name].add_(added[name])

    def discount(self, staleness: Any) -> Any:
        """s(tau) = (1 + tau)^-staleness, in float64."""
        return (1 + staleness) ** -self.staleness

    def _mean(self, arrivals: Arrivals, now: Params) -> Payload:
        """The uploads as the server's step sees them."""
        raise NotImplementedError

    def notes(self, state: State) -> dict[str, Any]:
        return {}

    def params(self, state: State) -> Params:
        return self.inner.params(self._seen(state))

    def with_params(self, state: State, params: Params) -> State:
        changed = self.inner.with_params(self._seen(state), params)
        return {**state, "models": changed if self.rows else [changed]}

    def scores(self, model: Any, state: State, x: Tensor) -> Tensor:
        return self.inner.scores(model, self._seen(state), x)

    def _seen(self, state: State) -> Any:
        """The state as the inner algorithm knows it."""
        return state["models"] if self.rows else state["models"][0]


class Late(NamedTuple):
    """An asynchronous algorithm, and the mean of its late rounds around it, if there is one."""

    algorithm: Asynchronous
    mean: Averaged | None = None

    @classmethod
    def of(cls, algorithm: Algorithm[Any]) -> Self | None:
        """None: the algorithm waits for its clients."""
        if isinstance(algorithm, Averaged) and isinstance(algorithm.inner, Asynchronous):
            return cls(algorithm.inner, algorithm)
        return cls(algorithm) if isinstance(algorithm, Asynchronous) else None

    def inner(self, state: Any) -> Any:
        """The asynchronous algorithm's own state."""
        return state if self.mean is None else state["inner"]

    def after(self, state: Any, inner: Any) -> Any:
        """The whole state after a round in which the own state became `inner`."""
        return inner if self.mean is None else self.mean.after(state, inner)


def combined(shares: Tensor, part: Params) -> Params:
    """sum_k share_k u_k, over the leading axis."""
    return tree.map_(lambda leaf: torch.tensordot(shares.to(leaf.device, leaf.dtype), leaf, 1), part)


@dataclass(frozen=True, eq=False)
class FedBuff(Asynchronous):
    """The server steps when `buffer` uploads are there, and older ones count for less (Nguyen et al., 2022, Alg. 1).

        w_{t+1} = server step along  1/K sum_k s(tau_k) delta_k,   s(tau) = (1 + tau)^-staleness

    tau_k is how many versions the model has moved since client k was sent it. `weighted` puts n_k / sum n_k in place of
    1/K. The cohort is how many clients are at work at any time, and a round is as many answers.

    Bytes per answer: those of a client in a round of the inner algorithm.
    """

    inner: Algorithm[Any]
    buffer: int = 10
    staleness: float = 0.5
    weighted: bool = False

    def mixing(self, sizes: list[int], weights: Array, staleness: Array) -> Array:
        step = np.arange(len(sizes)).repeat(sizes)  # of every upload
        counts = weights if self.weighted else np.ones(len(step))
        shares = counts / np.bincount(step, counts)[step] * self.discount(staleness)
        found: Array = (step <= np.arange(len(sizes))[:, None]) * (self.base.server_lr * shares)
        return found

    def moves(self, arrivals: Arrivals, now: Params) -> Params:
        return arrivals.upload["delta"]

    def _mean(self, arrivals: Arrivals, now: Params) -> Payload:
        weights = arrivals.weights.double().cpu() if self.weighted else torch.ones(len(arrivals.weights)).double()
        shares = weights / weights.sum()
        mean = {name: combined(shares, part) for name, part in arrivals.upload.items() if name != "delta"}
        return {
            "delta": combined(shares * self.discount(arrivals.staleness.double()), arrivals.upload["delta"]),
            **mean,
        }


@dataclass(frozen=True, eq=False)
class FedAsync(Asynchronous):
    """The server moves with every single answer (Xie et al., 2020, Alg. 1).

        w_{t+1} = (1 - a) w_t + a w_k,   a = alpha s(tau_k),   s(tau) = (1 + tau)^-staleness

    w_k is what client k made of the version it was sent. In the paper clients solve a proximal problem: use FedProx
    inside. Cohort, round and bytes as in FedBuff.
    """

    inner: Algorithm[Any]
    alpha: float = 0.6
    staleness: float = 0.5

    buffer = 1
    needs_start = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}, it must be above 0 and at most 1")

    def mixing(self, sizes: list[int], weights: Array, staleness: Array) -> Array:
        """w_i - w = (1 - a_i) (w_{i-1} - w) + a_i (w_k - w)."""
        a = self.base.server_lr * self.alpha * self.discount(staleness)
        found = np.diag(a)
        for i in range(1, len(a)):
            found[i, :i] = (1 - a[i]) * found[i - 1, :i]
        return found

    def moves(self, arrivals: Arrivals, now: Params) -> Params:
        made = tree.add(arrivals.start, arrivals.upload["delta"])
        return tree.map_(torch.sub, made, now)

    def _mean(self, arrivals: Arrivals, now: Params) -> Payload:
        share = self.alpha * self.discount(arrivals.staleness.double())
        mean = {name: tree.take(part, 0) for name, part in arrivals.upload.items() if name != "delta"}
        return {"delta": combined(share, self.moves(arrivals, now)), **mean}
