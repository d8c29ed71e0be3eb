"""Losses: outputs and targets of a batch in, one value per example out.

    by_target        the default: cross-entropy for whole numbers, squared error for floating-point targets
    cross_entropy    class numbers [B], or [B, T], ... with one label per token
    mse, mae, huber  floating-point targets of any shape: the mean over the numbers of an example
    bce              floating-point targets 0 and 1, several labels per example; outputs are logits

`CrossEntropy` has a label that does not count, and smoothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

__all__ = ["CrossEntropy", "bce", "by_target", "cross_entropy", "huber", "mae", "mse"]

IGNORED = -100  # torch's own: a label that does not count, such as that of padding


def class_axis(outputs: Sequence[int], targets: Sequence[int]) -> int:
    """Which axis of the outputs has one number per class: the last, or the second as in torch.

    >>> class_axis([8, 20, 50], [8, 20]), class_axis([8, 50, 20], [8, 20])
    (-1, 1)
    """
    outputs, targets = list(outputs), list(targets)
    last = outputs[:-1] == targets
    second = len(outputs) > 1 and [outputs[0], *outputs[2:]] == targets
    if last and second and len(outputs) > 2:
        raise ValueError(
            f"outputs of shape {outputs} for labels of shape {targets}: the classes may be on the second axis or on "
            "the last; say which, loss=fedge.losses.CrossEntropy(axis=-1) or axis=1"
        )
    if not last and not second:
        raise ValueError(
            f"outputs of shape {outputs} do not fit labels of shape {targets}: with C classes they must be "
            f"{[*targets, 'C']} or {[targets[0], 'C', *targets[1:]]}".replace("'", "")
        )
    return -1 if last else 1


@dataclass(frozen=True)
class CrossEntropy:
    """- log softmax(outputs)[y]; of an example with several labels, the mean over those that are not `ignore_index`.

    The classes are on the last axis of the outputs or on the second; `axis` says which where both fit. An example
    whose labels are all ignored has loss 0.
    """

    ignore_index: int = IGNORED
    axis: int | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.axis not in (None, 1, -1):
            raise ValueError(f"axis is {self.axis!r}, it must be 1 (outputs [N, C, T]), -1 ([N, T, C]) or None")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing is {self.label_smoothing}, it must be at least 0 and below 1")

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        axis = class_axis(outputs.shape, y.shape) if self.axis is None else self.axis
        flat = outputs.movedim(axis, -1).flatten(0, -2)
        each = F.cross_entropy(
            flat, y.flatten(), reduction="none", ignore_index=self.ignore_index, label_smoothing=self.label_smoothing
        )
        if y.dim() == 1:
            return each
        counted = (y != self.ignore_index).flatten(1).sum(1).clamp(min=1)
        return each.view(y.shape).flatten(1).sum(1) / counted


_PLAIN = CrossEntropy()


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """- log softmax(outputs)[y], one value per example; of several labels the mean, without those that are -100."""
    return F.cross_entropy(outputs, y, reduction="none") if y.dim() == 1 else _PLAIN(outputs, y)


def by_target(outputs: Tensor, y: Tensor) -> Tensor:
    """The loss that goes with the type of the targets: `mse` for floating-point ones, else `cross_entropy`."""
    return mse(outputs, y) if y.is_floating_point() else cross_entropy(outputs, y)


def mse(outputs: Tensor, y: Tensor) -> Tensor:
    """(outputs - y)^2, the mean over the numbers of an example."""
    return _mean((fitted(outputs, y) - y).square())


def mae(outputs: Tensor, y: Tensor) -> Tensor:
    """|outputs - y|, the mean over the numbers of an example."""
    return _mean((fitted(outputs, y) - y).abs())


def huber(outputs: Tensor, y: Tensor) -> Tensor:
    """d^2 / 2 where the difference d is below 1, |d| - 1/2 beyond; the mean over the numbers of an example."""
    return _mean(F.huber_loss(fitted(outputs, y), y, reduction="none"))


def bce(outputs: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy of logits and targets 0 and 1, the mean over the labels of an example."""
    return _mean(F.binary_cross_entropy_with_logits(fitted(outputs, y), y, reduction="none"))


def fitted(outputs: Tensor, y: Tensor) -> Tensor:
    """The outputs in the shape of the targets; [B, 1] and [B] are the same."""
    if outputs.shape == y.shape:
        return outputs
    if outputs.numel() == y.numel() and outputs.shape[0] == y.shape[0] and y[0].numel() == 1:
        return outputs.reshape(y.shape)
    raise ValueError(
        f"an example has outputs of shape {list(outputs.shape[1:])} and floating-point targets of shape "
        f"{list(y.shape[1:])}, which must be the same: build the model with as many outputs, or, if the targets are "
        "class numbers, give them as whole numbers (y.long())"
    )


def _mean(values: Tensor) -> Tensor:
    return values if values.dim() == 1 else values.flatten(1).mean(1)


def is_binary(loss: Callable[..., Any]) -> bool:
    """Whether outputs are logits of labels that hold or not, so that a prediction is their sign."""
    return loss is bce


def is_cross_entropy(loss: Callable[..., Any]) -> bool:
    """Whether it is the plain cross-entropy of class numbers, where targets are such."""
    return loss in (cross_entropy, by_target)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    one.__name__: one for one in (cross_entropy, mse, mae, huber, bce)
}
