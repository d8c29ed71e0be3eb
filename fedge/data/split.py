"""Parts of a data set with the same share of every class."""

from __future__ import annotations

from dataclasses import replace
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray

from fedge.data.base import Data
from fedge.inputs import take


def stratified(labels: NDArray[np.int64], count: int, seed: int = 0) -> NDArray[np.bool_]:
    """Mark `count` examples, drawn from every class by its share; what is left over goes to the largest remainders.

    >>> int(stratified(np.array([0, 0, 0, 0, 1, 1]), 3).sum())
    3
    """
    if not 0 < count < len(labels):
        raise ValueError(f"{count} of {len(labels)} examples were asked for, it must be at least 1 and not all")
    classes, sizes = np.unique(labels, return_counts=True)
    share = count * sizes / len(labels)
    take = np.floor(share).astype(np.int64)
    take[np.argsort(take - share, kind="stable")[: count - take.sum()]] += 1
    draw, marked = np.random.default_rng(seed), np.zeros(len(labels), dtype=np.bool_)
    for label, wanted in zip(classes, take, strict=True):
        own = np.flatnonzero(labels == label)
        marked[draw.permutation(own)[:wanted]] = True
    return marked


def hold_out(data: Data, share: float, seed: int = 0) -> Data:
    """The training set alone, cut in two: a share of every class becomes what is evaluated on. The test set is gone.

    Without classes (a regression, several labels per example) it is a share of all examples.

    >>> from fedge.data.digits import load_digits
    >>> hold_out(load_digits(), 0.2)
    Data(train=1150, test=287, shape=(1, 8, 8), classes=10)
    """
    if not 0 < share < 1:
        raise ValueError(f"validation is {share}, it must be above 0 and below 1 (0.1 holds out a tenth)")
    x, y = data.train_x, data.train_y
    labels = y.numpy() if data.labelled else np.zeros(len(y), np.int64)  # without classes, of all examples
    away = torch.from_numpy(stratified(labels, round(share * len(y)), seed))
    owners = tuple(compress(data.owners, (~away).tolist()))
    parts = {"train_x": take(x, ~away), "train_y": y[~away], "test_x": take(x, away), "test_y": y[away]}
    return replace(data, **parts, owners=owners)
