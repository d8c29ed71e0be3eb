"""Accuracy and loss of a model on a set of examples, over all and by class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedge.core import Algorithm, Model


@torch.no_grad()
def scores(algorithm: Algorithm[Any], model: Model, state: Any, x: Tensor, batch: int = 1000) -> Tensor:
    """[N, classes], computed in batches."""
    return torch.cat([algorithm.scores(model, state, part) for part in x.split(batch)])


@torch.no_grad()
def evaluate(algorithm: Algorithm[Any], model: Model, state: Any, x: Tensor, y: Tensor, classes: int) -> dict[str, Any]:
    """{"loss", "accuracy", "class_accuracy"}; regression targets (classes = 0) have a loss only.

    The accuracy of a class without examples is None.
    """
    found = scores(algorithm, model, state, x)
    result: dict[str, Any] = {"loss": float(algorithm.losses(found, y).double().mean())}
    if not classes:
        return result
    right = (found.argmax(1) == y).long()
    total = torch.bincount(y, minlength=classes).tolist()
    hits = torch.bincount(y, weights=right, minlength=classes).tolist()
    result["accuracy"] = int(right.sum()) / len(y)
    result["class_accuracy"] = [h / n if n else None for h, n in zip(hits, total, strict=True)]
    return result
