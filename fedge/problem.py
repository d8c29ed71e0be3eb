"""What kind of answers a run learns to give, read off its targets and its loss.

classes    one label per example, [N] whole numbers
tokens     several labels per example, [N, T], ... whole numbers
labels     labels that hold or not, floating-point 0 and 1 with the loss `bce`
numbers    floating-point targets: regression
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedge.checks import nearest
from fedge.losses import IGNORED, CrossEntropy, is_binary
from fedge.metrics import METRICS, Accuracy, Confusion, Errors, Metric, Perplexity

Kind = Literal["classes", "tokens", "labels", "numbers"]


@dataclass(frozen=True)
class Problem:
    """The kind, and for classes the labels as they were before they were numbered from 0."""

    kind: Kind = "classes"
    values: tuple[int, ...] | tuple[str, ...] = ()
    axis: int | None = None  # of the outputs, where the classes are; None: where there is one number per class
    ignore_index: int = IGNORED

    def predictions(self, scores: Tensor) -> Tensor | NDArray[np.str_]:
        """From scores to answers: the class with the largest, the labels that hold, or the outputs themselves.

        Classes that were words are words again, in a NumPy array: tensors hold numbers alone.
        """
        if self.kind == "numbers":
            return scores
        if self.kind == "labels":
            return (scores > 0).to(scores.dtype)
        found = scores.argmax(1 if self.kind == "classes" else -1 if self.axis is None else self.axis)
        if self.values and isinstance(self.values[0], str):
            words: NDArray[np.str_] = np.asarray(self.values)[found.cpu().numpy()]
            return words
        return torch.tensor(self.values, device=found.device)[found] if self.values else found

    def metrics(self) -> dict[str, Metric]:
        """What is computed beside the loss, whatever else is asked for; classes have their accuracy by class."""
        if self.kind == "numbers":
            return {"mse": Errors("mse"), "mae": Errors("mae"), "r2": Errors("r2")}
        if self.kind == "labels":
            return {"accuracy": Accuracy(), "f1": Confusion("f1")}
        if self.kind == "classes":
            return {}
        axis, ignored = self.axis, self.ignore_index
        return {"accuracy": Accuracy(axis, ignored), "perplexity": Perplexity(axis, ignored)}


FITTING: dict[Kind, tuple[str, ...]] = {  # of METRICS, those that mean something
    "classes": ("accuracy", "auc", "balanced_accuracy", "f1", "perplexity"),
    "tokens": ("accuracy", "auc", "balanced_accuracy", "f1", "perplexity"),
    "labels": ("accuracy", "auc", "balanced_accuracy", "f1"),
    "numbers": ("mae", "mse", "r2", "rmse"),
}
LEARNS: dict[Kind, str] = {
    "classes": "classes",
    "tokens": "several classes per example",
    "labels": "labels that hold or not",
    "numbers": "numbers (a regression)",
}


def check_metrics(metrics: Mapping[str, Metric | str] | Sequence[str], y: Tensor, loss: Any) -> None:
    """Refuse a metric of ours that means nothing for these targets; functions of the user's own are not looked at.

    An own loss may take targets of 0 and 1 for labels that hold or not: metrics of labels fit them too.
    """
    if isinstance(metrics, str) or not isinstance(metrics, Mapping | Sequence):
        return  # `named` says what is wrong with it
    kind = problem_of(y, loss).kind
    fit = set(FITTING[kind])
    if kind == "numbers" and bool(((y == 0) | (y == 1)).all()):
        fit |= {*FITTING["labels"]}
    for name, metric in metrics.items() if isinstance(metrics, Mapping) else ((one, one) for one in metrics):
        called = metric if isinstance(metric, str) else _ours(metric)
        if called is not None and called not in fit:
            wrong = "does not fit" if called in METRICS else f"is not known{nearest(called, fit)}"
            offered = ", ".join(sorted(fit - {"accuracy"}))  # which is computed anyhow
            raise ValueError(
                f"metric {name!r} {wrong}: this run learns {LEARNS[kind]}, for which there are {offered}; or give a "
                "function"
            )


def _ours(metric: Metric) -> str | None:
    """What a metric is called here, if it is one of ours."""
    return next((name for name, one in METRICS.items() if type(one) is type(metric) and one == metric), None)


def problem_of(y: Tensor, loss: Any, values: Sequence[Any] = (), outputs: Sequence[int] | None = None) -> Problem:
    """The problem of some targets, a loss, and outputs of a shape (of the first examples)."""
    inner = getattr(loss, "loss", loss)  # FedOVA's weighs one of two sides
    if y.is_floating_point():
        return Problem("labels" if is_binary(inner) else "numbers")
    if y.dim() == 1:
        return Problem("classes", tuple(values))
    entropy = inner if isinstance(inner, CrossEntropy) else CrossEntropy()
    axis = entropy.axis
    if axis is None and outputs is not None:
        axis = _axis(outputs, y.shape)
    return Problem("tokens", tuple(values), axis, entropy.ignore_index)


def _axis(outputs: Sequence[int], targets: Sequence[int]) -> int:
    """The second only where the last cannot be: an own loss may put the classes anywhere."""
    return -1 if [*outputs[1:-1]] == [*targets[1:]] else 1
