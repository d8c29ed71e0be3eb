"""Inputs on one scale: mean 0 and deviation 1 per channel."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedge.data.base import Data
from fedge.inputs import map_


def standardise(data: Data) -> Data:
    """(x - mean) / deviation per channel, both of the training set; the test set is changed alike.

    A channel is the first axis of an example, such as the colours of an image or the features of a row. What never
    changes becomes zeros. Whole numbers, such as tokens, stay as they are. On a fleet these two numbers per channel
    are part of the model: take them from public data, or sum them over the devices before training.

    >>> from fedge.data.digits import load_digits
    >>> x = standardise(load_digits()).train_x
    >>> round(x.mean().item(), 4) + 0.0, round(x.std().item(), 2)
    (0.0, 1.0)
    """
    test = map_(_like, data.test_x, data.train_x)
    return replace(data, train_x=map_(_like, data.train_x, data.train_x), test_x=test)


def _like(x: Tensor, train: Tensor) -> Tensor:
    """x on the scale on which the training set has mean 0 and deviation 1."""
    if not x.is_floating_point():
        return x
    over = [axis for axis in range(train.ndim) if axis != 1]
    mean, deviation = train.mean(over, keepdim=True), train.std(over, keepdim=True, correction=0)
    return (x - mean) / deviation.masked_fill(deviation == 0, 1.0)
