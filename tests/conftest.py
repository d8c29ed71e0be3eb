from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.paper import places

from . import paper


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Small tensors are slower on several threads, and much slower when tests share the machine."""
    torch.set_num_threads(1)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Small experiments in the place of the paper's."""
    folder = paper.write(tmp_path / "paper")
    monkeypatch.setattr("fedge.sweep.runner.release", lambda: None)  # garbage collection takes longer than such a run
    monkeypatch.setenv("FEDGE_PAPER", str(folder))
    places.paper.cache_clear()
    yield folder
    places.paper.cache_clear()
