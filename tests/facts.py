"""What a sentence states, whatever its words: the names and the numbers in it, in their order."""

from __future__ import annotations

import re

NAME = re.compile(r"(?:Clipped )?Fed[A-Z]\w+(?:-\w+)?|Fisher L-BFGS|paper|\b\w+-[lk]\d+|\b[BE] = \w+|l = \d+")
NUMBER = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def names(text: str) -> list[str]:
    """Methods, cells and settings; `paper` where its number is meant.

    >>> names("fmnist-k20: FedOVA at least the paper's 60.0 %")
    ['fmnist-k20', 'FedOVA', 'paper']
    """
    return NAME.findall(text)


def numbers(text: str) -> list[float]:
    """All numbers that are not part of a name.

    >>> numbers("fmnist-k20: FedOVA loses 4.0 (seeds 90.0, 88.0), 1 of 2 seeds")
    [4.0, 90.0, 88.0, 1.0, 2.0]
    """
    return [float(number) for number in NUMBER.findall(NAME.sub(" ", text))]
