"""Choosing a cohort: by speed or by what clients hold, among candidates that are drawn evenly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedge.checks import at_least_one, choice
from fedge.core import At
from fedge.edge.devices import Devices
from fedge.edge.draws import Array, lots
from fedge.edge.work import Workload
from fedge.federation import Federation
from fedge.keys import COHORT, choose, fold


@dataclass(frozen=True)
class Choice:
    """Of `among` times as many clients as are wanted, take the fastest, or those with the rarest labels.

    "speed": least latency + m_k (8 b / down + E n_k c / FLOPs + 8 b / up), with the bytes b of the model, its FLOPs c
    per example, E local epochs, and the m_k models that the client trains (1, or of FedOVA one per label it holds).
    "labels": one after another, the client whose labels the chosen ones hold least; every label gets its turn.
    Of equals, lots decide that are drawn for every cohort anew.
    """

    by: Literal["speed", "labels"] = "speed"
    among: int = 3

    def __post_init__(self) -> None:
        choice("by", self.by, ("speed", "labels"))
        at_least_one("among", self.among)


def by_choice(
    rule: Choice, federation: Federation, devices: Callable[[Array], Devices], load: Workload, size: int
) -> Callable[[At], Tensor]:
    """The draw of a cohort as a function of the address alone."""
    many = min(federation.clients, rule.among * size)
    pick = _fastest(devices, load) if rule.by == "speed" else _rarest(federation)

    def draw(at: At) -> Tensor:
        candidates = choose(fold(at.seed, COHORT, at.round, at.phase), federation.clients, many).numpy()
        candidates = candidates[lots(at, candidates).argsort()]
        return torch.from_numpy(np.sort(candidates[pick(candidates, size)]))

    return draw


def _fastest(devices: Callable[[Array], Devices], load: Workload) -> Callable[[Array, int], Array]:
    bits, flops = 8 * load.model_bytes, load.epochs * load.gradient_flops()

    def pick(clients: Array, size: int) -> Array:
        found = devices(clients)
        each = bits / found.down + load.sizes(clients) * flops / found.flops + bits / found.up
        seconds = found.latency + load.models(clients) * each
        fastest: Array = seconds.argsort(kind="stable")[:size]
        return fastest

    return pick


def _rarest(federation: Federation) -> Callable[[Array, int], Array]:
    labels, classes = federation.data.train_y.cpu(), federation.data.classes
    if not classes:
        raise ValueError("cohorts are to be chosen by labels, but this is a regression: choose by speed, or evenly")

    known = dict[int, Array]()  # by client: which labels it holds, [classes]

    def held(client: int) -> Array:
        if client not in known:
            known[client] = np.zeros(classes)
            known[client][labels[federation.examples(client).cpu()].unique().numpy()] = 1
        return known[client]

    def pick(clients: Array, size: int) -> Array:
        own = np.concatenate([held(client) for client in clients.tolist()]).reshape(len(clients), -1)
        common, many = own @ own.T, own.sum(1)  # labels that two candidates have in common, and that each has
        np.fill_diagonal(common, np.inf)  # nobody is chosen twice
        crowd, shares, found = np.zeros(len(clients)), np.empty(len(clients)), list[Any]()
        for _ in range(size):
            found.append(np.divide(crowd, many, out=shares).argmin())
            crowd += common[found[-1]]
        return np.array(found)

    return pick
