"""What can be refused before any work is done, with an error that says what to do."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor

from fedge.core import Algorithm, Params, Privacy
from fedge.engine import Loopback, Ranks, Simulator
from fedge.engine.links.base_link import Around, BaseLink
from fedge.engine.runtime import Runtime
from fedge.federation import Federation
from fedge.handle.probe import changing_buffer
from fedge.inputs import described, take
from fedge.losses import LOSSES, CrossEntropy, bce, by_target, cross_entropy, huber, mae, mse
from fedge.once import is_new

log = logging.getLogger("fedge")
SOME, FEW = 10_000, 20  # training examples whose labels are counted, and too few to say anything
FAR_MEAN, FAR_DEVIATION = 20.0, 10.0  # of targets: an MLP diverges there with the default step size of 0.1
FOR_NUMBERS = (mse, mae, huber, bce)  # losses of floating-point targets


def check_arguments(algorithm: Any, federation: Any, seed: Any) -> None:
    """The slips that would otherwise surface deep inside."""
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"the first argument is {_kind(algorithm)}, it must be an algorithm such as FedAvg(model)")
    for name in ("model", "loss"):
        if not hasattr(algorithm, name):
            raise TypeError(f"{type(algorithm).__name__} has no field {name!r}: an algorithm needs `model` and `loss`")
    if not isinstance(federation, Federation):
        raise TypeError(f"the second argument is {_kind(federation)}, it must be a Federation(data, lists)")
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(f"seed is {seed!r}, it must be a whole number")


def _kind(thing: Any) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"


def check_privacy(
    privacy: Privacy | None, clients: int, cohort: int | None, sampling: str, trains: bool, link: BaseLink | None
) -> None:
    """A private algorithm counts on how clients are drawn, on nobody knowing it, and on what is not recorded."""
    if privacy is None:
        return
    rate = 1.0 if cohort is None else cohort / clients
    if not math.isclose(rate, privacy.rate):
        raise ValueError(
            f"Private counts on each client being drawn with probability {privacy.rate:g}, but cohort is {cohort} of "
            f"{clients}: set its clients and expected, or the cohort, so that they agree"
        )
    if sampling != "poisson":
        raise ValueError(
            f"sampling is {sampling!r}, but Private counts on every client being drawn by itself: 'poisson'"
        )
    if trains:
        raise ValueError(
            "evaluate_train judges the model on clients' examples, without noise: leave it out of Private; per_client "
            "too, unless the federation knows their test examples"
        )
    if link is not None and link.min_replies > 1:
        raise ValueError(
            f"min_replies is {link.min_replies}, but with Private one client more must not decide whether the uploads "
            "of the others are released: leave it at 1"
        )
    while isinstance(link, Around):
        link = link.inner
    if privacy.secret is None and not (link is None or isinstance(link, Simulator | Ranks | Loopback)):
        raise ValueError(
            "Private has no secret, and every device of a fleet knows the seed: make a file with "
            "`openssl rand -out noise.key 32`, keep it on the server, and set secret to its path"
        )


def check_link(algorithm: Algorithm[Any], link: BaseLink) -> None:
    own = link.algorithm
    if own is not algorithm:
        raise ValueError(f"the link was made for another {type(own).__name__}: make one with this algorithm object")


def check_model(algorithm: Algorithm[Any], runtime: Runtime, params: Params) -> None:
    """One example through the model; torch's own errors say neither what nor why."""
    x, y = runtime.x, runtime.y
    _check_loss(algorithm.loss)
    _check_targets(algorithm.loss, y)
    _say_scale(algorithm.loss, y)
    _say_labels(y)
    try:
        algorithm.check(runtime.handle, params, x, y)
        runtime.handle.check_loss(params, take(x, slice(2)), y[:2])
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"the model cannot take an example of {described(x)}: {error}") from error
    _check_buffers(runtime, params)


def _check_buffers(runtime: Runtime, params: Params) -> None:
    if not any(True for _ in runtime.handle.module.buffers()):
        return
    try:
        name = changing_buffer(runtime.handle, params, runtime.x)
    except (RuntimeError, TypeError, IndexError, AttributeError):
        return  # a model that cannot be trained: the first step says why
    if name is not None:
        raise ValueError(
            f"the model changes its buffer '{name}' in forward, which is no parameter and has no meaning across "
            "clients: leave it out, or make it a parameter (frozen, if it is not to be trained)"
        )


def _check_targets(loss: Any, y: Tensor) -> None:
    """A loss of ours that is for the other kind of targets."""
    if y.is_floating_point() and (loss is cross_entropy or isinstance(loss, CrossEntropy)):
        raise ValueError(
            f"the labels are {y.dtype} and the loss is cross-entropy: give class numbers as int64, or another loss= "
            "such as fedge.losses.mse"
        )
    if not y.is_floating_point() and any(loss is one for one in FOR_NUMBERS):
        raise ValueError(
            f"the targets are class numbers ({y.dtype}) and the loss is {loss.__name__}, which is for floating-point "
            "ones: leave out loss=, or, if they are quantities, give them as floating-point numbers"
        )


def _say_scale(loss: Any, y: Tensor) -> None:
    """Targets far from 0 and 1 make steps of the usual size diverge: said once, with the remedy."""
    if not y.is_floating_point() or not any(loss is one for one in (by_target, mse, mae, huber)):
        return
    mean, deviation = float(y.double().mean()), float(y.double().std(correction=0))
    if abs(mean) <= FAR_MEAN and deviation < FAR_DEVIATION:
        return
    told = (
        f"the targets have mean {mean:.4g} and standard deviation {deviation:.4g}: with a usual step size "
        f"{'mse' if loss is by_target else loss.__name__} diverges or learns little; train on (y - {mean:.4g}) / "
        f"{deviation or 1:.4g} and turn predictions back, or lower lr"
    )
    if is_new(told):
        log.warning(told)


def _say_labels(y: Tensor) -> None:
    """Nearly as many classes as examples: not the column of labels, most likely."""
    some = y[:SOME]
    if y.is_floating_point() or y.ndim > 1 or len(some) < FEW:
        return
    found = len(some.unique())
    if 2 * found <= len(some):
        return
    told = (
        f"{found} different labels in {len(some)} training examples: is this the column of labels? If it is a "
        "quantity, give it as floating-point numbers, and the model is a regression"
    )
    if is_new(told):
        log.warning(told)


def say_unmoved(history: Sequence[Mapping[str, Any]]) -> None:
    """An asynchronous server that took no step in a whole run: its model is the one that it began with."""
    steps = [record["server_steps"] for record in history if "server_steps" in record]
    if steps and not any(steps):
        log.warning(
            f"the server took no step in {len(steps)} rounds, so the model is the one that it began with: no buffer "
            "was filled with good answers; lower buffer, or train for more rounds (around FedOVA every class has a "
            "buffer of its own)"
        )


def _check_loss(loss: Any) -> None:
    if callable(loss):
        return
    known = f": write loss=fedge.losses.{loss}" if loss in LOSSES else f", such as fedge.losses.{next(iter(LOSSES))}"
    raise TypeError(f"loss is {loss!r}, it must be a function of outputs and targets{known}")


def check_start(fresh: Any, state: Any, it: str = "start is the run") -> None:
    """An earlier run's state must be of this algorithm and of this model; what one of them lacks is not compared."""
    for kind in (dict, list, tuple, Tensor):
        if isinstance(fresh, kind) and not isinstance(state, kind):
            raise ValueError(
                f"{it} of another algorithm: its state has a {type(state).__name__} where this one has a "
                f"{kind.__name__}"
            )
    if isinstance(fresh, dict) and isinstance(state, dict):
        for name in fresh:
            if name not in state:
                raise ValueError(f"{it} of another algorithm: its state has no {name!r}")
            check_start(fresh[name], state[name], it)
    elif isinstance(fresh, list) and isinstance(state, list):
        if len(state) < len(fresh):
            raise ValueError(f"{it} of another algorithm: its state has {len(state)} of {len(fresh)} parts")
        for one, other in zip(fresh, state, strict=False):
            check_start(one, other, it)
    elif isinstance(fresh, Tensor) and isinstance(state, Tensor):
        _check_tensor(fresh, state, it)


def _check_tensor(fresh: Tensor, state: Tensor, it: str) -> None:
    if fresh.shape != state.shape:
        shapes = f"{list(state.shape)}, here it is {list(fresh.shape)}"
        raise ValueError(f"{it} of another model: a tensor of its state has shape {shapes}")
    if fresh.dtype != state.dtype:
        raise ValueError(f"{it} of another model: a tensor of its state is {state.dtype}, here it is {fresh.dtype}")
