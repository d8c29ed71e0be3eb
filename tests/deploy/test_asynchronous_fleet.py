"""Asynchronous training on a real SuperLink with four nodes, one of them slow: killed servers, killed nodes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedge.deploy.bundle import project
from fedge.deploy.fleet import Fleet
from fedge.runs import checkpoint
from fedge.toml import dump
from tests.cases import close
from tests.deploy.processes import Marked, running
from tests.deploy.test_asynchronous import replayed
from tests.deploy.uneven import FOLDER, NODES, SECONDS, SLOW
from tests.test_asynchronous import ALGORITHMS

pytestmark = pytest.mark.deploy


class Uneven:
    """The fleet, and the runs on it."""

    def __init__(self, folder: Path, marked: Marked) -> None:
        self.folder, self.marked = folder, marked
        self.fleet = Fleet(folder / "fleet", NODES, environment=marked.env() | {FOLDER: str(folder)})
        self.app = folder / "app"
        (self.app / "fleet").mkdir(parents=True)
        (self.app / "fleet/__init__.py").write_text("")
        module = "from tests.deploy import uneven\n\nclient = uneven.client()\nserver = uneven.server()\n"
        (self.app / "fleet/app.py").write_text(module)
        (self.app / "pyproject.toml").write_text(dump(project("fedge-uneven")))

    def begin(self, name: str, rounds: int, resume: bool = False) -> None:
        (self.folder / "algorithm").write_text(name)
        self.out = self.folder / name
        self.fleet.submit(self.app, {"out": str(self.out), "resume": resume, "nodes": rounds})

    def records(self) -> list[dict[str, Any]]:
        path = self.out / "rounds.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def until(self, rounds: int) -> list[dict[str, Any]]:
        self.marked.wait_for(lambda: len(self.records()) >= rounds, 200)
        return self.records()

    def answers(self) -> list[Any]:
        return [answer for record in self.records() for answer in record["answers"]]

    def assert_replayed(self, name: str) -> None:
        """A plain loop over the answers on record gives the models of the checkpoint."""
        self.marked.wait_for((self.out / "summary.json").exists, 30)
        state = checkpoint.load(self.out / "checkpoint.pt")["state"]
        plain = replayed(ALGORITHMS[name](), SimpleNamespace(history=self.records()))
        assert state["events"]["versions"] == plain.versions
        for model, params in zip(state["models"], plain.models, strict=True):
            assert close(model["params"], params) < 1e-11

    def kill_server(self) -> None:
        (pid,) = [pid for pid, words in running(self.marked.mark).items() if "flwr-serverapp" in words]
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Uneven]:
    folder = tmp_path_factory.mktemp("uneven")
    found = Uneven(folder, Marked(folder))
    with found.fleet:
        yield found


def test_the_slow_node_holds_up_nobody(uneven: Uneven) -> None:
    uneven.begin("fedasync", 6)
    uneven.until(6)
    seconds = {client: [] for client in range(NODES)}
    for _, client, _, taken in uneven.answers():
        seconds[client].append(taken)
    assert all(taken >= SECONDS for taken in seconds[SLOW])
    others = [taken for client in range(NODES) if client != SLOW for taken in seconds[client]]
    assert len(others) >= 2 * max(1, len(seconds[SLOW]))
    assert not [drop for record in uneven.records() for drop in record["dropped"]]
    uneven.assert_replayed("fedasync")


def test_a_killed_server_goes_on(uneven: Uneven) -> None:
    """kill -9: versions and buffers are those of the checkpoint, and the order of both is right.

    The last record may be there without its checkpoint: then its round is done again.
    """
    uneven.begin("fedbuff_fedova", 5)
    uneven.until(1)
    uneven.kill_server()
    before = uneven.records()[:-1]
    uneven.begin("fedbuff_fedova", 5, resume=True)
    after = uneven.until(5)
    assert after[: len(before)] == before
    assert [record["round"] for record in after] == [1, 2, 3, 4, 5]
    faults = [fault for record in after[len(before) :][:2] for fault in record.get("faults", [])]
    assert any("went on from its checkpoint" in fault for fault in faults)
    uneven.assert_replayed("fedbuff_fedova")


def test_a_killed_node_is_named_and_the_others_go_on(uneven: Uneven) -> None:
    uneven.begin("fedbuff", 60)
    uneven.until(1)
    os.kill(uneven.fleet.processes["node-1"].pid, signal.SIGKILL)
    dropped: list[Any] = []

    def named() -> bool:
        dropped[:] = [drop for record in uneven.records() for drop in record["dropped"]]
        return bool(dropped)

    uneven.marked.wait_for(named, 150)
    uneven.kill_server()
    assert {drop["client"] for drop in dropped} == {1}
    assert any(words in dropped[0]["reason"] for words in ("no answer within 20 s", "Flower says"))
    later = [client for _, client, *_ in uneven.records()[-1]["answers"]]
    assert set(later) - {1}
