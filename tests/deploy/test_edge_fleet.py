"""`fedge edge fit` on a fleet of five nodes that are throttled by different factors: the devices tell its rounds."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
from typer.testing import CliRunner

from fedge.cli.app import app
from fedge.deploy.bundle import write_app
from fedge.deploy.fleet import Fleet
from fedge.deploy.local import follow
from fedge.experiment import Watch, compare, parse
from tests.deploy.processes import Marked

pytestmark = pytest.mark.deploy

TOML = """
name = "throttled"
[data]
name = "digits"
[partition]
kind = "dirichlet"
clients = 5
alpha = 1.0
[model]
name = "mlp"
[train]
rounds = 8
cohort = 3
checkpoint_every = 1
[algorithm]
name = "fedavg"
epochs = 1
batch_size = 20
"""

# Work takes so many more milliseconds per example, by client: most rounds take ten seconds and more, beside which the
# noise in the start of processes (a second or two, and no device can tell it) is small.
THROTTLE = """
import time
from fedge.engine.clients.worker import Worker
work, more = Worker.work, [0.0, 8.0, 18.0, 38.0, 75.0]
def throttled(self, *words):
    time.sleep(more[self.client] * len(self.y) / 1000)
    return work(self, *words)
Worker.work = throttled
"""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_fitted_devices_tell_the_seconds_of_a_round(tmp_path: Path) -> None:
    experiment = parse(tomllib.loads(TOML))
    folder = write_app(tmp_path / "app", experiment)
    module = folder / "fleet/app.py"
    module.write_text(THROTTLE + module.read_text())
    with Fleet(tmp_path / "fleet", 5, environment=Marked(tmp_path).env()) as fleet:
        run = fleet.submit(folder, {"out": str(tmp_path / "out"), "news": str(fleet.folder), "deadline": 120.0})
        follow(fleet, run, Watch(), lambda: False)
    words = ["edge", "fit", str(tmp_path / "out/fedavg"), "--out", str(tmp_path / "devices.csv"), "--json"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    measured = [
        phase["seconds"] for record in lines(tmp_path / "out/fedavg/rounds.jsonl") for phase in record["phases"]
    ]
    assert told["measured"] == pytest.approx(measured)
    table = {**experiment.table(), "edge": {"file": str(tmp_path / "devices.csv")}}
    (outcome,) = compare(parse(table), tmp_path / "simulated")
    assert outcome.run is not None
    virtual = [record["virtual_seconds"] for record in outcome.run.history]
    errors = f"error {told['error']:.3f}, of rounds ahead {told['error_ahead']:.3f}"
    print(f"{mean(measured):.2f} s per round measured, {mean(virtual):.2f} s predicted, {errors}")
    assert mean(virtual) == pytest.approx(mean(measured), rel=0.2)
    assert max(measured) > 1.5 * min(measured), "the cohorts are alike: nothing was predicted"
    guess = median(abs(mean(measured[:at] + measured[at + 1 :]) / one - 1) for at, one in enumerate(measured))
    assert told["error_ahead"] < min(0.3, guess), "a round ahead is told no better than by the mean of the others"
