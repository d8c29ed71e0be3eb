"""Accuracy and loss of a model on a set of examples, over all and by class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedge.core import Algorithm
from fedge.handle import Handle

BATCH = {"cpu": 250}  # examples: what lies between two layers fits a CPU's cache
MOST = 1000  # elsewhere


@torch.no_grad()
def scores(algorithm: Algorithm[Any], model: Handle, state: Any, x: Tensor) -> Tensor:
    """[N, classes], computed in batches."""
    parts = x.split(BATCH.get(x.device.type, MOST))
    return torch.cat([algorithm.scores(model, state, model.laid_out(part)) for part in parts])


@torch.no_grad()
def evaluate(
    algorithm: Algorithm[Any], model: Handle, state: Any, x: Tensor, y: Tensor, classes: int
) -> dict[str, Any]:
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
