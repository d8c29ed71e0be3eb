"""Who takes part in a phase: the draw of a cohort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from torch import Tensor

from fedge import secret
from fedge.checks import at_least_one, choice
from fedge.core import At
from fedge.keys import COHORT, choose, fold

Draw = Callable[[At], Tensor]
Sampling = Literal["fixed", "poisson"]


def cohorts(clients: int, cohort: int | None, sampling: Sampling = "fixed", hidden: str | None = None) -> Draw:
    """The draw of a cohort as a function of the address alone, or of a hidden file as well."""
    choice("sampling", sampling, get_args(Sampling))
    size = clients if cohort is None else cohort
    at_least_one("cohort", size)
    if size > clients:
        raise ValueError(f"cohort is {size}, but there are only {clients} clients: lower it to at most {clients}")
    if sampling == "fixed":
        return lambda at: choose(fold(at.seed, COHORT, at.round, at.phase), clients, size)
    key, rate = secret.read(hidden), size / clients
    return lambda at: secret.chosen(key, f"cohort {at.seed} {at.round} {at.phase}", clients, rate)
