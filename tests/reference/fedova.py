"""FedOVA (Alg. 2): one separate binary run a class, over the clients that hold the class."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .common import Client, Cohorts, Order, Params, by_examples, flatten, with_params


def fedova(
    reference: Callable[..., Any],
    module: nn.Module | Sequence[nn.Module],
    clients: list[Client],
    cohorts: Cohorts,
    order: Order,
    classes: int,
    *,
    weighted: bool = False,
    **options: Any,
) -> Params:
    """Class-stacked parameters: entry c is the reference's run on the problem "is it c?".

    `reference` is `fedavg`, `feddane` or `fisher_lbfgs`. `module` has two outputs; a list gives
    every class its own start. Client ids and round numbers stay; a round in which some phase has
    nobody who holds c is not taken by class c.
    """
    options["weight"] = by_examples if weighted else equally
    runs = []
    for c in range(classes):
        start = module if isinstance(module, nn.Module) else module[c]
        binary = [(x, (y == c).long()) for x, y in clients]
        restricted = [[holders(clients, cohort, c) for cohort in phases] for phases in cohorts]
        result = reference(start, binary, restricted, order, **options)
        runs.append(result[0] if isinstance(result, tuple) else result)
    return {name: torch.stack([run[name] for run in runs]) for name in runs[0]}


def fedova_predict(module: nn.Module, params: Params, x: Tensor) -> Tensor:
    """argmax over classes of logit[1] - logit[0]."""
    margins = []
    for c in range(len(next(iter(params.values())))):
        own = {name: stack[c] for name, stack in params.items()}
        with torch.no_grad():
            logits = with_params(module, flatten(module, own))(x)
        margins.append(logits[:, 1] - logits[:, 0])
    return torch.stack(margins).argmax(dim=0)


def equally(n: int) -> float:
    """A client's weight in a plain mean over the group."""
    return 1.0


def holders(clients: list[Client], cohort: Sequence[int], c: int) -> list[int]:
    """The cohort's clients with at least one example of class c: the group P_c."""
    return [k for k in cohort if (clients[k][1] == c).any()]
