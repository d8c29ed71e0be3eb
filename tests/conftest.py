import math
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.paper import places

from . import paper


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="every algorithm through every common test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all-cases"):
        return
    long = [item for item in items if item.get_closest_marker("all_cases")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if not item.get_closest_marker("all_cases")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skipped test is a failed one where FEDGE_NO_SKIPS is set: for machines that have every tool."""
    report = yield
    if report.skipped and os.environ.get("FEDGE_NO_SKIPS") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and FEDGE_NO_SKIPS is set: {report.longrepr[-1]}"
    return report


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Small tensors are slower on several threads, and much slower when tests share the machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def long_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded as in a run of unknown length: the short runs of tests would hardly record any."""
    if not request.node.get_closest_marker("short_runs"):
        monkeypatch.setattr("fedge.engine.choosing.Choosing._ahead", lambda link: math.inf)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Small experiments in the place of the paper's."""
    folder = paper.write(tmp_path / "paper")
    monkeypatch.setattr("fedge.sweep.runner.release", lambda: None)  # garbage collection takes longer than such a run
    monkeypatch.setenv("FEDGE_PAPER", str(folder))
    places.paper.cache_clear()
    yield folder
    places.paper.cache_clear()
