"""Accuracy and loss of a model on a set of examples, over all and by class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedge.core import Algorithm
from fedge.data import Data
from fedge.engine.runtime import Runtime
from fedge.handle import Handle
from fedge.hooks import Metric

BATCH = {"cpu": 250}  # examples: what lies between two layers fits a CPU's cache
MOST = 1000  # elsewhere


@torch.no_grad()
def scores(algorithm: Algorithm[Any], model: Handle, state: Any, x: Tensor) -> Tensor:
    """[N, classes], computed in batches."""
    parts = x.split(BATCH.get(x.device.type, MOST))
    return torch.cat([algorithm.scores(model, state, model.laid_out(part)) for part in parts])


@torch.no_grad()
def evaluate(
    algorithm: Algorithm[Any],
    model: Handle,
    state: Any,
    x: Tensor,
    y: Tensor,
    classes: int,
    metrics: Mapping[str, Metric] | None = None,
) -> dict[str, Any]:
    """{"loss", "accuracy", "class_accuracy"} and further metrics; regression targets (classes = 0) have no accuracy.

    The accuracy of a class without examples is None.
    """
    found = scores(algorithm, model, state, x)
    result: dict[str, Any] = {"loss": float(algorithm.losses(found, y).double().mean())}
    result |= {name: _number(name, metric(found, y)) for name, metric in (metrics or {}).items()}
    if not classes:
        return result
    right = (found.argmax(1) == y).long()
    total = torch.bincount(y, minlength=classes).tolist()
    hits = torch.bincount(y, weights=right, minlength=classes).tolist()
    result["accuracy"] = int(right.sum()) / len(y)
    result["class_accuracy"] = [h / n if n else None for h, n in zip(hits, total, strict=True)]
    return result


def _number(name: str, value: Any) -> float:
    """What a metric returned, as a number that a file can hold."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"metric {name!r} gave {value!r}, it must give one number") from None


class Judge:
    """Evaluates a state on the test set and, when wanted, on the training set."""

    def __init__(self, data: Data, runtime: Runtime, train: bool, metrics: Mapping[str, Metric] | None = None) -> None:
        self.classes, self.runtime, self.metrics = data.classes, runtime, metrics
        x = data.test_x.to(runtime.x.dtype).to(runtime.x.device)
        self.sets = {"test": (x, data.test_y.to(runtime.x.device))}
        if train:
            self.sets["train"] = (runtime.x, runtime.y)

    def __call__(self, algorithm: Algorithm[Any], state: Any) -> dict[str, Any]:
        record: dict[str, Any] = {}
        for name, (x, y) in self.sets.items():
            with self.runtime.judging():
                found = evaluate(algorithm, self.runtime.handle, state, x, y, self.classes, self.metrics)
            record |= {f"{name}_{key}": value for key, value in found.items()}
        return record
