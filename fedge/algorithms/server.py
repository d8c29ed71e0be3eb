"""The server's step along the mean update: by which optimiser, and how long in which round."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any, Literal, Protocol, get_args

from fedge import tree
from fedge.algorithms import schedule
from fedge.algorithms.kronecker import SOAP, Shampoo
from fedge.algorithms.optimisers import SGD, Adam, Moments, Optimiser
from fedge.algorithms.spectral import Spectral
from fedge.checks import choice, positive, unit_interval
from fedge.core import Params

ServerName = Literal["sgd", "adam", "spectral", "shampoo", "soap"]
Served = ServerName | SGD | Adam | Spectral | Shampoo | SOAP | Optimiser


class HasServer(Protocol):
    """The fields of an algorithm whose server takes such steps."""

    @property
    def lr_decay(self) -> float: ...
    @property
    def server_lr(self) -> float: ...
    @property
    def server_momentum(self) -> float: ...
    @property
    def server_optimiser(self) -> Served: ...
    @property
    def server_betas(self) -> tuple[float, float]: ...
    @property
    def server_eps(self) -> float: ...
    @property
    def server_lr_decay(self) -> float: ...
    @property
    def server_warmup(self) -> int: ...


def check(algorithm: HasServer) -> None:
    positive("server_eps", algorithm.server_eps)
    for beta in algorithm.server_betas:
        unit_interval("server_betas", beta)
    warmup: Any = algorithm.server_warmup
    if isinstance(warmup, bool) or not isinstance(warmup, Integral) or int(warmup) < 0:
        raise ValueError(f"server_warmup is {warmup!r}, it must be a whole number of rounds, 0 or more")
    momentum = {"server_momentum": algorithm.server_momentum}
    check_optimiser("server_optimiser", algorithm.server_optimiser, momentum, get_args(ServerName))
    if algorithm.server_optimiser == "adam" and algorithm.server_momentum:
        raise ValueError(f"server_momentum is {algorithm.server_momentum}, but server Adam has its own: leave it at 0")


def check_optimiser(name: str, value: Any, beside: Mapping[str, float], known: tuple[str, ...]) -> None:
    """A name, or an object that nothing beside it contradicts."""
    if not isinstance(value, Optimiser):
        return choice(name, value, known)
    for field, given in beside.items():
        if given:
            raise ValueError(f"{field} is {given}, but {name}={type(value).__name__}(...) has its own: leave it at 0")


def rule(algorithm: HasServer) -> Optimiser:
    """The optimiser of a name, with the fields beside it."""
    named, momentum, betas = algorithm.server_optimiser, algorithm.server_momentum, algorithm.server_betas
    if not isinstance(named, str):
        return named
    if named == "adam":
        return Adam(betas, algorithm.server_eps)
    if named == "spectral":
        return Spectral.server(momentum)
    if named in ("shampoo", "soap"):
        return (Shampoo if named == "shampoo" else SOAP)(momentum, betas[1])
    return SGD(momentum)


def begin(algorithm: HasServer, params: Params) -> dict[str, Any]:
    """What an algorithm's state has besides the parameters: the optimiser's, and a round's number if it matters."""
    return {"server": rule(algorithm).start(params), **count(algorithm)}


def count(algorithm: HasServer) -> dict[str, Any]:
    return schedule.begin(1 if _even(algorithm) else 0.5)


def step(algorithm: HasServer, state: Mapping[str, Any], delta: Params) -> dict[str, Any]:
    """The parameters and the rest of `begin` after the step of this round along the mean update."""
    size = server_size(algorithm, state.get("round", 0))
    params, moments = rule(algorithm).step(state["params"], tree.scale(-1.0, delta), state["server"], size)
    return {"params": params, "server": moments, **schedule.after(1 if _even(algorithm) else 0.5, dict(state))}


def server_size(algorithm: HasServer, round: int) -> float:
    """server_lr * server_lr_decay^t, in the first `server_warmup` rounds t = 0, 1, ... times (t + 1) / (warmup + 1)."""
    grown = min(1.0, (round + 1) / (algorithm.server_warmup + 1))
    return grown * algorithm.server_lr * algorithm.server_lr_decay**round


def _even(algorithm: HasServer) -> bool:
    """Whether no step size depends on the round."""
    return algorithm.lr_decay == 1 and algorithm.server_lr_decay == 1 and algorithm.server_warmup == 0


__all__ = ["HasServer", "Moments", "Served", "begin", "check", "check_optimiser", "count", "rule", "step"]
