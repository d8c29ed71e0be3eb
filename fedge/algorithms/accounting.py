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
from typing import Any

Spent = Mapping[str, int]  # releases from one cohort -> how many such cohorts there were


class MissingAccountant(ImportError):
    """The extra that counts privacy is not installed."""


def require() -> None:
    """Before anything is trained: the package that counts is there."""
    if find_spec("dp_accounting") is None:
        raise MissingAccountant("Private needs dp-accounting: pip install 'fedge[private]'", name="dp_accounting")


def epsilon(spent: Spent, rate: float, noise: float, delta: float) -> float | None:
    """(epsilon, delta) of these cohorts for adding or removing one client; None: without noise nothing is promised.

    A cohort is drawn client by client with probability `rate`. Of m sums released from one, each with noise of
    standard deviation noise * clip, an adversary learns as much as from one sum with noise / sqrt(m).
    """
    if not noise:
        return None
    require()
    from dp_accounting import rdp

    orders = _orders()
    total = sum(count * _cohort(rate, noise, int(releases)) for releases, count in spent.items())
    with _quiet():
        found: float = rdp.compute_epsilon(orders, total, delta)[0] if spent else 0.0
    return float(found)


@lru_cache(maxsize=64)
def _cohort(rate: float, noise: float, releases: int) -> Any:
    """Renyi's divergence of one cohort, at every order."""
    import dp_accounting
    from dp_accounting import rdp

    counted = rdp.RdpAccountant(_orders())
    with _quiet():
        counted.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise / releases**0.5)))
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
