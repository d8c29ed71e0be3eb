"""Argument checks that all partitions share: every error gives the value, the limit, the remedy."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedge.checks import LARGEST, brief


def as_rows(name: str, values: ArrayLike | Tensor) -> NDArray[Any]:
    """Turn an array, list or tensor into a numpy array with one row per example."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim == 0 or len(array) == 0:
        raise ValueError(f"{name} has shape {array.shape}, must have at least 1 example")
    return array


def as_labels(y: ArrayLike | Tensor) -> NDArray[Any]:
    """Turn labels into a one-dimensional array of integers or strings."""
    array = as_rows("y", y)
    if array.ndim != 1:
        raise ValueError(f"y has shape {array.shape}, labels must be one-dimensional: flatten them")
    if array.dtype.kind not in "biuUS":
        raise ValueError(
            f"y has dtype {array.dtype}, labels must be integers or strings: "
            "convert them, or use iid or quantity_skew, which ignore labels"
        )
    return array


def check_whole(name: str, value: int, least: int) -> None:
    """Refuse anything but a whole number of at least `least`."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < least:
        raise ValueError(f"{name} is {value!r}, must be a whole number of at least {least}")


def check_clients(clients: int, examples: int, min_examples: int = 1) -> None:
    """Refuse more clients than the examples can fill."""
    check_whole("clients", clients, 1)
    check_whole("min_examples", min_examples, 0)
    if clients > examples:
        raise ValueError(f"{clients} clients but only {examples} examples: use at most {examples} clients")
    if clients * min_examples > examples:
        raise ValueError(
            f"{clients} clients with min_examples={min_examples} need {clients * min_examples} "
            f"examples, there are {examples}: use at most {examples // min_examples} clients "
            f"or min_examples={examples // clients}"
        )


def check_alpha(alpha: float) -> None:
    """Refuse a Dirichlet concentration that is not a positive finite number."""
    if not 0 < alpha <= LARGEST:  # the sum over clients has to be a number too
        limits = f"positive and finite, at most {LARGEST:g}"
        raise ValueError(f"alpha is {brief(alpha)}, must be {limits}: 0.1 is very uneven, 100 nearly even")


def generator(seed: int) -> np.random.Generator:
    """Give the generator of a seed, which must be a whole number so that results repeat."""
    check_whole("seed", seed, 0)
    return np.random.default_rng(seed)
