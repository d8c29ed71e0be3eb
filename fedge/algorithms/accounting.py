"""Epsilon of what was released, by the maintained accountant `dp-accounting`, in Renyi's form.

Mironov, Renyi Differential Privacy, CSF 2017; Mironov, Talwar and Zhang, Renyi Differential Privacy of the Sampled
Gaussian Mechanism, 2019; the conversion of Canonne, Kamath and Steinke, The Discrete Gaussian, NeurIPS 2020.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple


class Release(NamedTuple):
    """Sums that were released of one cohort: with which noise, how it was drawn, and how many."""

    noise: float  # standard deviation / clip
    rate: float  # every client was drawn with this probability
    sums: int


Spent = Mapping[tuple[float, float, int], int]  # a `Release` -> of how many cohorts; plain tuples in a checkpoint


class MissingAccountant(ImportError):
    """The extra that counts privacy is not installed."""


def require() -> None:
    """Before anything is trained: the package that counts is there."""
    if find_spec("dp_accounting") is None:
        raise MissingAccountant("Private needs dp-accounting: pip install 'fedge[private]'", name="dp_accounting")


def epsilon(spent: Spent, delta: float) -> float | None:
    """(epsilon, delta) of all releases, for adding or removing one client; None: some were without noise.

    A cohort is drawn client by client with probability `rate`. Of m sums released from one, each with noise of
    standard deviation noise * clip, an adversary learns as much as from one sum with noise / sqrt(m).
    """
    releases = {Release(*one): count for one, count in spent.items()}
    if not all(one.noise for one in releases):
        return None
    if not releases:
        return 0.0
    require()
    from dp_accounting import rdp

    total = sum(count * _divergence(one) for one, count in releases.items())
    with _quiet():
        return float(rdp.compute_epsilon(_orders(), total, delta)[0])


@lru_cache(maxsize=64)
def _divergence(one: Release) -> Any:
    """Renyi's, of one cohort, at every order."""
    import dp_accounting
    from dp_accounting import rdp

    counted = rdp.RdpAccountant(_orders())
    noisy = dp_accounting.GaussianDpEvent(one.noise / one.sums**0.5)
    with _quiet():
        counted.compose(dp_accounting.PoissonSampledDpEvent(one.rate, noisy))
    return counted.rdp


@lru_cache(maxsize=1)
def _orders() -> Any:
    from dp_accounting import rdp

    return rdp.RdpAccountant().orders


@contextmanager
def _quiet() -> Iterator[None]:
    """The accountant leaves out orders whose series converges slowly, and says so for each; the bound stays one."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
