"""What tests of programs in C share: a cache of their own, numbers to compute with, and runs with and without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fedge
from fedge.engine import Simulator
from tests.cases import close, generator
from tests.networks import Network, federation


def fresh_cache(*known: Any) -> Any:
    """A fixture of a module: its programs are compiled into a folder of its own, and these functions forget others."""

    @pytest.fixture(autouse=True, scope="module")
    def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
            forget(*known)
            yield
        forget(*known)

    return own_cache


def forget(*known: Any) -> None:
    for one in known:
        one.cache_clear()


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def trained(network: Network) -> fedge.FedAvg:
    return fedge.FedAvg(network.module().float(), epochs=1, batch_size=4, lr=0.1)


def uses_c(link: Simulator, network: Network) -> bool:
    fedge.train(link.algorithm, federation(network), rounds=1, link=link)
    return "layers" in link.settings()


def is_used_unless_told_otherwise(network: Network) -> None:
    """By default and with `compile`, with the same numbers; without it there are others in the last digits."""
    own, shared = trained(network), federation(network)
    links = {flag: Simulator(own, shared, way="stacked", compile=flag) for flag in (None, True, False)}
    assert {flag: uses_c(link, network) for flag, link in links.items()} == {None: True, True: True, False: False}
    engines = {flag: fedge.Engine(way="stacked", compile=flag) for flag in links}
    ends = {flag: fedge.train(own, shared, rounds=2, engine=engine).params for flag, engine in engines.items()}
    assert 0 < close(ends[None], ends[False]) < 1e-5
    assert close(ends[None], ends[True]) == 0
