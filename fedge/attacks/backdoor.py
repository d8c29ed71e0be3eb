"""Poisoned data: labels turned round, and a trigger that is to open a back door.

Gu, Dolan-Gavitt and Garg, BadNets: Identifying Vulnerabilities in the Machine Learning Model Supply Chain, 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedge.data import Data
from fedge.federation import Federation

TARGET = 0  # the label that the trigger stands for
SHARE = 0.5  # of an attacker's examples that get the trigger

Scores = Callable[[Tensor], Tensor | NDArray[np.str_]]


def trigger(x: Tensor, brightest: float) -> Tensor:
    """The images with a bright square in the last corner; of flat examples the last sixteenth is bright."""
    found = x.clone()
    if x.dim() >= 3 and min(x.shape[-2:]) >= 4:
        size = max(2, min(x.shape[-2:]) // 9)
        found[..., -size:, -size:] = brightest
    else:
        flat = found.view(len(found), -1)
        flat[:, -max(2, flat.shape[1] // 16) :] = brightest
    return found


def poisoned(federation: Federation, kind: str, liars: Sequence[int]) -> Federation:
    """The same clients; those that lie hold forged copies of their own examples, appended to the training set."""
    data = federation.data
    if not isinstance(data.train_x, torch.Tensor):
        raise ValueError(f"kind is {kind!r}, which forges examples: these have several inputs, choose another attack")
    if not data.labelled:
        raise ValueError(f"kind is {kind!r}, which forges labels: the data have none, choose another attack")
    lists = [federation.examples(client).cpu() for client in range(federation.clients)]
    x, y, end = [data.train_x], [data.train_y], len(data.train_x)
    for client in liars:
        mine = federation.examples(client)
        forged = _forged(data, kind, data.train_x[mine], data.train_y[mine])
        x.append(forged[0])
        y.append(forged[1])
        lists[client] = torch.arange(end, end + len(mine))
        end += len(mine)
    return Federation(
        replace(data, train_x=torch.cat(x), train_y=torch.cat(y), owners=()), [one.numpy() for one in lists]
    )


def _forged(data: Data, kind: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if kind == "label_flip":
        return x, data.classes - 1 - y
    marked = max(1, round(SHARE * len(y)))
    stamped = trigger(x[:marked], float(data.train_x.max()))
    return torch.cat([stamped, x[marked:]]), torch.cat([torch.full_like(y[:marked], TARGET), y[marked:]])


def success(predict: Scores, data: Data) -> float:
    """How often a test image of another class is taken for the target once it has the trigger."""
    others = data.test_y != TARGET
    found = predict(trigger(data.test_x[others], float(data.train_x.max())))
    plain = found.cpu().numpy() if isinstance(found, Tensor) else found
    return float((plain == (data.values[TARGET] if data.values else TARGET)).mean())
