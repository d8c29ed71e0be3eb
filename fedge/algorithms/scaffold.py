"""SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning, ICML 2020."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedge import tree
from fedge.algorithms import schedule, server
from fedge.algorithms.local import LocalTraining, check_settings
from fedge.algorithms.optimisers import SGD
from fedge.algorithms.server import Served
from fedge.checks import at_least_one, choice
from fedge.core import Algorithm, Ask, Carry, Flow, Loss, Model, Params, Payload, Range, Reply, Task
from fedge.handle import by_target

State = dict[str, Any]
OWN, VISITS = "own_control", "visits"  # what a client remembers
INVERSE = Range(  # 1 / n_k
    "presence",
    2.0**-53,
    1.0,
    name="inverse",
    least=lambda sent, examples: 1 / examples,
    most=lambda examples: 1 / examples,
)


@dataclass(frozen=True, eq=False)
class SCAFFOLD(Algorithm[State]):
    """FedAvg whose clients correct every local step by what they know of their own drift (Alg. 1, option II).

        w_k     = E epochs of steps  w <- w - lr (g + weight_decay w - c_k + c),  from w_t
        c_k^+   = c_k - c + (w_t - w_k) / L_k,   L_k = the sum of client k's step sizes
        w_{t+1} = w_t + server_lr * mean over the cohort S of  w_k - w_t,  or another server step
        c       <- c + |S| / N * mean over S of  c_k^+ - c_k

    A client remembers its control c_k, which is 0 at first and is never sent. The server's c is at all times the mean
    of the c_k of all N clients. With equal step sizes L_k is the paper's K lr. `lr_decay`, `inner_decay`, `clip` and
    `server_...` are as in FedAvg; what is clipped is the corrected gradient.

    `clients` is N; an experiment file takes it from its partition. With None, N is the number of clients that have
    taken part so far: a client's first upload says that it is new. FedOVA needs this, because N differs from class to
    class.

    The rule for c adds up what clients send, for ever: a client that lies a little in every round moves it as far as it
    likes, and a rule that limits every upload does not limit the sum. With `control="average"` they send c_k^+ itself:

        c <- c + |S| / N * (mean over S of c_k^+  -  c)

    which forgets. If all take part it is the same; else c is the mean of all c_k on average over cohorts, not at all
    times. `Robust` takes SCAFFOLD in this form only.

    The means are plain, as in the paper, whose objective is the mean of the clients' objectives. The fixed point is
    decided by c, not by the mean of the updates. `weighted` weighs both means by n_k, as FedAvg does, and the objective
    is then the mean over examples. The weights of clients that were not seen yet are unknown, so leave `clients` at
    None there. Inside FedOVA, give both the same `weighted`.

    Bytes per round, d parameters of b bytes, cohort c: down 2 c d b, up c (2 d b + 4); with clients=None also up c b,
    if weighted up 2 c b; with lr_decay < 1 also down c b. A client remembers d b, with clients=None b more.
    """

    model: nn.Module
    lr: float = 0.1
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
    weighted: bool = False
    clients: int | None = None
    control: Literal["sum", "average"] = "sum"
    loss: Loss = by_target

    def __post_init__(self) -> None:
        check_settings(self)
        server.check(self)
        choice("control", self.control, ("sum", "average"))
        if self.clients is None:
            return
        at_least_one("clients", self.clients)
        if self.weighted:
            raise ValueError(f"clients is {self.clients}, but weighted means need the weights of all: leave it at None")

    def no_rule_limits(self) -> str | None:
        if self.control == "average":
            return None
        return "SCAFFOLD adds up what clients send, which no rule for single uploads limits: give it control='average'"

    def tasks(self, model: Model) -> Mapping[str, Task]:
        def corrected(sent: Payload, held: Params, params: Params, grad: Params) -> Params:
            return tree.add(grad, tree.sub(sent["control"], sent[OWN]))

        tasks = self._local().tasks("train", model, lambda sent, carry: {}, bend=corrected)
        remembers = (OWN, VISITS) if self.clients is None else (OWN,)
        told = (Range("presence", 0.0, 1.0), *([INVERSE] if self.weighted else []))
        train = replace(tasks["train"], finish=self._finish, remembers=remembers, first=_nothing_yet, ranges=told)
        if not self.weighted:
            train = replace(train, heaviest=torch.ones_like)
        return {**tasks, "train": train}

    def _finish(self, sent: Payload, carry: Carry, examples: Tensor) -> tuple[Payload, Tensor]:
        delta = tree.sub(carry["params"], sent["params"])
        change = tree.scale(-1.0, tree.axpy(1 / (self.lr * carry["length"]), delta, sent["control"]))  # c_k^+ - c_k
        own = tree.add(sent[OWN], change)
        told = {"control": own} if self.control == "average" else {"change": change}
        upload = {"delta": delta, **told, OWN: own}
        weight = examples.float() if self.weighted else torch.ones_like(examples, dtype=torch.float32)
        if self.clients is None:
            upload |= self._presence(sent, carry["length"], examples)
        return upload, weight

    def _presence(self, sent: Payload, like: Tensor, examples: Tensor) -> Payload:
        """Whether this client is new and, for the cohort's sum of weights, the inverse of its own."""
        visits = sent[VISITS]["count"]
        told = {"new": (visits == 0).to(like.dtype)}
        if self.weighted:
            told["inverse"] = 1 / examples.to(like.dtype)
        return {"presence": told, VISITS: {"count": visits + 1}}

    def _local(self) -> LocalTraining:
        rule = SGD(weight_decay=self.weight_decay)
        size = (self.lr, self.epochs, self.batch_size)
        return LocalTraining(rule, *size, self.clip, self.inner_decay, measured=True)

    def init(self, params: Params) -> State:
        return {"params": params, **self._begin(params)}

    def adopt(self, state: State) -> State:
        return self._begin(state["params"]) | state

    def _begin(self, params: Params) -> State:
        seen = {"seen": next(iter(params.values())).new_zeros(())} if self.clients is None else {}
        return {"control": tree.zeros_like(params), **seen, **server.begin(self, params)}

    def round(self, state: State) -> Flow[State]:
        send = {"params": state["params"], "control": state["control"], **schedule.part(self.lr_decay, state)}
        trained = yield Ask(self._local().asked("train"), send)
        return {**server.step(self, state, trained.mean["delta"]), **self._control(trained, state)}

    def _control(self, trained: Reply, state: State) -> State:
        """The mean of all clients' controls after this round: c + |S| / N * mean change, where N may have grown."""
        control = state["control"]
        change = trained.mean["change"] if self.control == "sum" else tree.sub(trained.mean["control"], control)
        if self.clients is not None:
            return {"control": tree.axpy(int(trained.clients) / self.clients, change, control)}
        told, here = trained.mean["presence"], trained.clients.to(state["seen"])
        if self.weighted:
            here = here / told["inverse"]  # sum of n_k = |S| / (mean of 1 / n_k by n_k)
        seen = torch.maximum(state["seen"] + here * told["new"], here)  # whoever is here has been seen
        if self.control == "sum":  # the sum stays, of more clients
            control = tree.scale(state["seen"] / seen, control)
        return {"control": tree.axpy(here / seen, change, control), "seen": seen}


def _nothing_yet(sent: Payload) -> Payload:
    """What a new client remembers."""
    like = next(iter(sent["params"].values()))
    return {OWN: tree.zeros_like(sent["params"]), VISITS: {"count": like.new_zeros(())}}
