"""Metrics: outputs and targets in, one number out.

A function of all outputs [N, ...] and targets [N, ...] is a metric. It needs the outputs of the whole test set at once,
in memory. A `Streamed` metric is a function of sums, and sees one batch at a time: memory does not grow with the test
set. All metrics here are streamed, except `auc`.

Several labels per example (tokens) count one by one, without those that are -100; outputs have the classes on the last
axis, [N, T, C], or on the second, [N, C, T].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedge.checks import nearest
from fedge.losses import IGNORED, CrossEntropy, class_axis, fitted

__all__ = ["Accuracy", "Confusion", "Errors", "Mean", "Perplexity", "Streamed", "auc"]

Best = Literal["largest", "smallest"]
CONSTANT = 1e-13  # targets that deviate less from their mean, relative to it, differ by rounding alone
Metric = Callable[[Tensor, Tensor], Any]  # outputs, targets -> a number


class Streamed(ABC):
    """A number made of sums: `sums` of one batch, added up over batches, and the `value` of the whole.

    `sums` returns a float64 tensor of one shape, whatever the size of the batch. Two batches are `joined` by adding
    theirs up; a metric that would lose digits so joins them in its own way.
    """

    best: ClassVar[Best] = "largest"

    @abstractmethod
    def sums(self, outputs: Tensor, y: Tensor) -> Tensor: ...

    @abstractmethod
    def value(self, sums: Tensor) -> float: ...

    def joined(self, one: Tensor, other: Tensor) -> Tensor:
        """The sums of two batches together."""
        return one + other

    def __call__(self, outputs: Tensor, y: Tensor) -> float:
        return self.value(self.sums(outputs, y))


@dataclass(frozen=True)
class Mean(Streamed):
    """The mean of a function that gives one value per example, [N]."""

    function: Callable[[Tensor, Tensor], Tensor]

    def sums(self, outputs: Tensor, y: Tensor) -> Tensor:
        values = self.function(outputs, y).double()
        return torch.stack([values.sum(), values.new_tensor(float(len(values)))])

    def value(self, sums: Tensor) -> float:
        return _ratio(sums[0], sums[1])


@dataclass(frozen=True)
class Accuracy(Streamed):
    """The share of labels that are predicted rightly: of classes, of tokens, or of labels that hold or not."""

    axis: int | None = None
    ignore_index: int = IGNORED

    def sums(self, outputs: Tensor, y: Tensor) -> Tensor:
        guess, wanted = decided(outputs, y, self.axis, self.ignore_index)
        return torch.stack([(guess == wanted).sum(), wanted.new_tensor(wanted.numel())]).double()

    def value(self, sums: Tensor) -> float:
        return _ratio(sums[0], sums[1])


@dataclass(frozen=True)
class Perplexity(Streamed):
    """exp of the mean cross-entropy per label."""

    axis: int | None = None
    ignore_index: int = IGNORED
    best: ClassVar[Best] = "smallest"

    def sums(self, outputs: Tensor, y: Tensor) -> Tensor:
        flat, wanted = per_label(outputs, y, self.axis, self.ignore_index)
        each = CrossEntropy()(flat, wanted).double()
        return torch.stack([each.sum(), each.new_tensor(float(len(each)))])

    def value(self, sums: Tensor) -> float:
        return float(torch.exp(sums[0] / sums[1])) if sums[1] else float("nan")


@dataclass(frozen=True)
class Confusion(Streamed):
    """From how often each class was taken for each: F1 and balanced accuracy, the mean over classes with examples.

    With floating-point targets 0 and 1 (several labels per example) F1 is that of all labels together.
    """

    of: Literal["f1", "balanced_accuracy"]

    def sums(self, outputs: Tensor, y: Tensor) -> Tensor:
        guess, wanted = decided(outputs, y)
        classes = 2 if y.is_floating_point() else outputs.shape[class_axis(outputs.shape, y.shape)]
        return torch.bincount(wanted * classes + guess, minlength=classes**2).view(classes, classes).double()

    def value(self, sums: Tensor) -> float:
        hits, wanted, guessed = sums.diagonal(), sums.sum(1), sums.sum(0)
        if len(sums) == 2 and self.of == "f1":
            return _ratio(2 * hits[1], wanted[1] + guessed[1])
        seen = wanted > 0
        each = hits / wanted if self.of == "balanced_accuracy" else 2 * hits / (wanted + guessed)
        return float(each[seen].mean())


@dataclass(frozen=True)
class Errors(Streamed):
    """From the mean of y, sum (y - mean y)^2 and the errors, per output: mean squared and absolute error, and R^2.

    R^2 = 1 - sum (y - f)^2 / sum (y - mean y)^2, the mean over the outputs that vary. Batches are joined around their
    means, so that targets far from 0 lose no digits: with d the difference of the means,

        sum (y - mean y)^2 = sum_a (y - mean_a)^2 + sum_b (y - mean_b)^2 + d^2 n_a n_b / (n_a + n_b)

    T. F. Chan, G. H. Golub and R. J. LeVeque, "Algorithms for Computing the Sample Variance", Am. Stat. 37 (1983).
    """

    of: Literal["mse", "rmse", "mae", "r2"]

    @property
    def best(self) -> Best:  # type: ignore[override]
        return "largest" if self.of == "r2" else "smallest"

    def sums(self, outputs: Tensor, y: Tensor) -> Tensor:
        wanted = y.double().reshape(len(y), -1)
        off = fitted(outputs, y).double().reshape(len(y), -1) - wanted
        count, mean = torch.full_like(wanted[0], len(wanted)), wanted.mean(0)
        parts = ((wanted - mean).square(), off.square(), off.abs())
        return torch.stack([count, mean, *(part.sum(0) for part in parts)])  # [5, outputs]

    def joined(self, one: Tensor, other: Tensor) -> Tensor:
        """Chan's formula: the mean and the squares around it, the rest added up."""
        found = one + other
        share, apart = other[0] / found[0], other[1] - one[1]
        found[1] = one[1] + share * apart
        found[2] += apart.square() * share * one[0]
        return found

    def value(self, sums: Tensor) -> float:
        count, mean, spread, off, away = sums
        if self.of == "mae":
            return _ratio(away.sum(), count.sum())
        if self.of != "r2":
            found = _ratio(off.sum(), count.sum())
            return found**0.5 if self.of == "rmse" else found
        varies = spread > count * (CONSTANT * mean).square()
        return float((1 - off / spread)[varies].mean()) if bool(varies.any()) else float("nan")


def auc(outputs: Tensor, y: Tensor) -> float:
    """The area under the ROC curve: how often an example of the class scores above one that is not, ties by half.

    Of two classes, that of class 1 by the difference of the outputs; of more, and of several labels per example, the
    mean over those that some examples have and some have not. Needs all outputs at once.
    """
    if y.is_floating_point():
        scores, holds = fitted(outputs, y).reshape(len(y), -1), y.reshape(len(y), -1) > 0.5
    else:
        flat, wanted = per_label(outputs, y)
        scores = flat.double() if flat.shape[1] > 2 else (flat[:, 1:] - flat[:, :1]).double()
        first = 0 if flat.shape[1] > 2 else 1
        holds = wanted[:, None] == torch.arange(first, flat.shape[1], device=y.device)
    found = [_area(column, hold) for column, hold in zip(scores.unbind(1), holds.unbind(1), strict=True)]
    known = [one for one in found if one is not None]
    return sum(known) / len(known) if known else float("nan")


def _area(scores: Tensor, holds: Tensor) -> float | None:
    """By ranks: (sum of the ranks of those that hold - P (P + 1) / 2) / (P N), tied scores at their mean rank."""
    yes, no = int(holds.sum()), int((~holds).sum())
    if not yes or not no:
        return None
    _, place, count = scores.unique(return_inverse=True, return_counts=True)
    rank = (count.cumsum(0).double() - (count.double() - 1) / 2)[place]
    return (float(rank[holds].sum()) - yes * (yes + 1) / 2) / (yes * no)


def per_label(
    outputs: Tensor, y: Tensor, axis: int | None = None, ignore_index: int = IGNORED
) -> tuple[Tensor, Tensor]:
    """Outputs [L, C] and labels [L] of all L labels that count."""
    axis = class_axis(outputs.shape, y.shape) if axis is None else axis
    counts = y.flatten() != ignore_index
    return outputs.movedim(axis, -1).flatten(0, -2)[counts], y.flatten()[counts]


def decided(outputs: Tensor, y: Tensor, axis: int | None = None, ignore_index: int = IGNORED) -> tuple[Tensor, Tensor]:
    """Predicted and true labels of all that count, [L]; a label that may hold holds where its logit is above 0."""
    if y.is_floating_point():
        return (fitted(outputs, y) > 0).flatten().long(), (y > 0.5).flatten().long()
    flat, wanted = per_label(outputs, y, axis, ignore_index)
    return flat.argmax(1), wanted


def _ratio(above: Tensor, below: Tensor) -> float:
    return float(above / below) if below else float("nan")


METRICS: dict[str, Metric] = {
    "accuracy": Accuracy(),
    "auc": auc,
    "balanced_accuracy": Confusion("balanced_accuracy"),
    "f1": Confusion("f1"),
    "mae": Errors("mae"),
    "mse": Errors("mse"),
    "perplexity": Perplexity(),
    "r2": Errors("r2"),
    "rmse": Errors("rmse"),
}


def named(metrics: Mapping[str, Metric | str] | Sequence[str]) -> dict[str, Metric]:
    """Metrics by name: ["f1", "auc"], {"f1": "f1"} or {"mine": a function}."""
    if isinstance(metrics, str) or not isinstance(metrics, Mapping | Sequence):
        raise ValueError(f"metrics is {metrics!r}, it must be a list of names or a dict of functions")
    table = metrics if isinstance(metrics, Mapping) else {name: name for name in metrics}
    return {name: _function(name, one) for name, one in table.items()}


def _function(name: str, metric: Any) -> Metric:
    if not isinstance(metric, str):
        return metric  # type: ignore[no-any-return]
    if metric not in METRICS:
        close = nearest(metric, METRICS)
        raise ValueError(f"metric {metric!r} is not known{close}, known are {', '.join(METRICS)}; or give a function")
    return METRICS[metric]


def best_of(name: str, metric: Metric | None) -> Best:
    """Whether large or small values are good: what the metric says in `best`; of a loss, small ones."""
    found = getattr(metric, "best", "smallest" if name == "loss" else "largest")
    return "smallest" if found == "smallest" else "largest"
