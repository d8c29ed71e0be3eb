"""Simulator, loop-back and Flower give the same parameters and the same ledger, for every kind of algorithm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fedge
from fedge.engine import Ledger, Loopback, Row, Simulator
from tests.cases import close
from tests.deploy.parity_algorithms import COHORT, ROUNDS, SEED, algorithms, federation
from tests.deploy.processes import quiet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All algorithms in one simulation of ten nodes."""
    out = tmp_path_factory.mktemp("parity")
    command = [sys.executable, "-m", "tests.deploy.parity_run", out]
    done = subprocess.run(command, env=quiet(out / "home"), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 of 10 nodes are connected" in done.stdout
    return out


@pytest.mark.deploy
@pytest.mark.parametrize("label", algorithms())
def test_simulator_loopback_and_flower_agree(label: str, fleet: Path) -> None:
    algorithm, fed = algorithms()[label], federation()
    flower: dict[str, Any] = torch.load(fleet / f"{label}.pt", weights_only=True)
    assert flower["dropped"] == [[]] * ROUNDS
    rows = [Row(**row) for row in flower["ledger"]]
    for link in (Simulator(algorithm, fed), Loopback(algorithm, fed)):
        run = fedge.train(algorithm, fed, rounds=ROUNDS, cohort=COHORT, seed=SEED, link=link)
        gap = close(run.params, flower["params"])
        print(f"{label}: {type(link).__name__} and Flower differ by {gap:.1e}")
        assert gap < 1e-9
        assert run.ledger.rows == rows
    for row in rows:  # every phase has its bytes on the wire: more than the payload, by framing alone
        assert row.wire_down is not None
        assert row.wire_up is not None
        assert row.wire_down > row.down
        assert row.wire_up > row.up
        if row.task not in ("rows", "share"):
            assert row.wire_down + row.wire_up < row.down + row.up + 30_000 * row.clients
    assert Ledger(rows).wire() is not None
