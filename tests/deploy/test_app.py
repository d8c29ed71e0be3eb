"""examples/flower_app: what `flwr run` accepts, in Flower's simulation and in a deployment, and `fedge run` too."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedge
from fedge.deploy import bundle
from fedge.deploy.fleet import Fleet
from fedge.deploy.local import follow, reopen
from fedge.deploy.process import Process, free_port, listens, stop_all
from fedge.engine import Ledger
from fedge.experiment import Setup, Watch, build, load
from tests.cases import close
from tests.deploy.processes import ROOT, Marked, program

pytestmark = pytest.mark.deploy
APP = ROOT / "examples/flower_app"
ROUNDS = 3


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Marked]:
    marked = Marked(tmp_path_factory.mktemp("app"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in marked.env().items():
            patch.setenv(name, value)
        yield marked
    marked.assert_no_process()


@pytest.fixture(scope="module")
def setup() -> Setup:
    return build(load(APP / "fleet/experiment.toml"))


@pytest.fixture(scope="module")
def simulated(setup: Setup) -> fedge.Run:
    (algorithm,) = setup.algorithms.values()
    return fedge.train(algorithm, setup.federation, rounds=ROUNDS, seed=0)


def test_the_example_is_what_fedge_deploys() -> None:
    assert (APP / "fleet/app.py").read_text() == bundle.MODULE
    assert tomllib.loads((APP / "pyproject.toml").read_text()) == bundle.project("fedge-flower-app")


def same(out: Path, setup: Setup, simulated: fedge.Run) -> fedge.Run:
    run = reopen(out / "fedova", setup, "FedOVA")
    assert run.rounds == ROUNDS
    assert [record["dropped"] for record in run.history] == [[]] * ROUNDS
    assert close(run.params, simulated.params) < 1e-6
    assert run.ledger.rows == simulated.ledger.rows
    return run


def test_flwr_run_in_a_simulation(here: Marked, setup: Setup, simulated: fedge.Run) -> None:
    port, home = free_port(), here.folder / "home"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(f'[superlink.sim]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
    command = [program("flower-superlink"), "--insecure", "--simulation", "--port", str(port)]
    superlink = Process("superlink", command, here.env(), here.folder / "simulation.log")
    try:
        here.wait_for(lambda: listens(port), 60)
        config = f'out="{here.folder / "simulation"}" deadline=60.0 wait=120.0'
        nodes = "num-supernodes=3 client-resources-num-cpus=1"
        done = here.run(
            "flwr", "run", str(APP), "sim", "--stream", "--federation-config", nodes, "--run-config", config
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert (here.folder / "simulation/fedova/summary.json").exists(), done.stdout + done.stderr
    finally:
        stop_all([superlink])
    same(here.folder / "simulation", setup, simulated)


def test_flwr_run_in_a_deployment(here: Marked, setup: Setup, simulated: fedge.Run) -> None:
    """Also: Flower's own count of bytes agrees with the ledger's bytes on the wire."""
    with Fleet(here.folder / "fleet", 3) as fleet:
        out = here.folder / "deployment"
        run = fleet.submit(APP, {"out": str(out), "news": str(fleet.folder), "deadline": 120.0})
        assert follow(fleet, run, Watch(), lambda: False).error is None
        traffic: dict[str, Any] = fleet.traffic(run)["network-traffic"]
    ledger = same(out, setup, simulated).ledger
    wire = Ledger(list(ledger)).wire()
    assert wire is not None
    for ours, theirs in ((wire["up"], traffic["inbound-bytes"]), (wire["down"], traffic["outbound-bytes"])):
        print(f"the ledger has {ours} bytes on the wire, the SuperLink counted {theirs}")
        assert 0.98 < ours / theirs < 1.02
