"""Class labels as users have them, numbered from 0 as a model needs them."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

log = logging.getLogger("fedge")
FEW = 100  # so many different labels are never taken for the targets of a regression


class Numbered(NamedTuple):
    """Labels of both parts in [0, classes), and what each class was called before, if that was another number."""

    train: Tensor
    test: Tensor
    classes: int
    values: tuple[int, ...] = ()


def numbered(train: Tensor, test: Tensor, names: int = 0) -> Numbered:
    """Labels that do not count up from 0 without gaps are numbered anew, in ascending order, and that is said.

    >>> numbered(torch.tensor([1, 3]), torch.tensor([3])).values
    (1, 3)
    """
    found = torch.cat([train, test]).unique()
    least, most = int(found[0]), int(found[-1])
    if least == 0 and most == len(found) - 1:
        return Numbered(train, test, most + 1)
    if names and least >= 0 and most < names:  # a class without examples
        return Numbered(train, test, names)
    _check_few(len(found), len(train) + len(test))
    log.warning(
        "the labels are %s: inside they are numbered 0 to %d, and predictions are given as your labels%s",
        _shown(found.tolist()),
        len(found) - 1,
        f"; classes={most + 1} keeps your numbers" if least >= 0 else "",
    )
    parts = [torch.searchsorted(found, part.contiguous()) for part in (train, test)]
    return Numbered(parts[0], parts[1], len(found), tuple(found.tolist()))


def _check_few(distinct: int, examples: int) -> None:
    if distinct > max(FEW, examples // 2):
        raise ValueError(
            f"there are {distinct} different whole numbers among {examples} targets: for a regression give them as "
            "floating-point numbers, for so many classes number them from 0"
        )


def _shown(labels: list[int]) -> str:
    if labels[-1] - labels[0] == len(labels) - 1:
        return f"{labels[0]} to {labels[-1]}"
    return ", ".join(map(str, labels)) if len(labels) <= 8 else f"{', '.join(map(str, labels[:6]))}, ..., {labels[-1]}"


def from_words(train: NDArray[Any], test: NDArray[Any]) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Labels that are words: their numbers in alphabetical order, and the words as class names."""
    train, test = train.astype(str), test.astype(str)
    words = np.unique(np.concatenate([train.ravel(), test.ravel()]))
    parts = [torch.from_numpy(np.searchsorted(words, part)) for part in (train, test)]
    return parts[0], parts[1], tuple(map(str, words.tolist()))
