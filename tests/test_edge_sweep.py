"""[edge] in a sweep: every run has its clock and its policy, and fields of the table can be swept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedge
from fedge import toml
from fedge.cli.app import app
from fedge.report import read, to_target
from fedge.runs.experiments import records

FILE = """
[data]
name = "digits"

[partition]
kind = "iid"
clients = 8

[model]
name = "logistic"

[train]
rounds = 2
cohort = 4
{train}

[edge]
profile = "phone"
{edge}

[[algorithm]]
{algorithm}
"""
FEDAVG, FEDBUFF = 'name = "fedavg"', 'name = "fedbuff"\nbuffer = 3\n[algorithm.inner]\nname = "fedavg"'
POLICY = 'policy = {name = "first_of", count = 2}'


def run(out: Path, train: str, edge: str = "", algorithm: str = FEDAVG, *options: str) -> Path:
    out.mkdir()
    (out / "mine.toml").write_text(FILE.format(train=train, edge=edge, algorithm=algorithm))
    done = CliRunner().invoke(app, ["run", str(out / "mine.toml"), "--out", str(out / "runs"), *options])
    assert done.exit_code == 0, done.output
    return out / "runs"


def times(folder: Path) -> list[float]:
    return [record["virtual_seconds"] for record in records(folder)]


def test_a_sweep_has_the_clock_of_the_same_run_alone(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", "seed = 1", POLICY) / "fedavg"
    swept = run(tmp_path / "swept", "seeds = [0, 1]", POLICY) / "fedavg-seed-1"
    assert times(swept) == times(alone) != []
    assert [one["late"] for one in records(swept)] == [one["late"] for one in records(alone)]
    for key in ("final_accuracy", "virtual_seconds"):
        found = [json.loads((folder / "summary.json").read_text())[key] for folder in (swept, alone)]
        assert found[0] == found[1] is not None


def test_results_and_tables_of_a_sweep_have_seconds_and_joules_of_the_devices(tmp_path: Path) -> None:
    out = run(tmp_path / "swept", "seeds = [0, 1]", POLICY, FEDAVG, "--set", "target=0.01")
    for row in fedge.results(out):
        summary = json.loads((Path(row["folder"]) / "summary.json").read_text())
        assert row["virtual_seconds"] == pytest.approx(summary["virtual_seconds"])
        assert row["joules"] == pytest.approx(summary["joules"])
        assert row["virtual_seconds_to_target"] == pytest.approx(times(Path(row["folder"]))[0])
        assert 0 < row["joules_to_target"] < row["joules"]
    rounds = fedge.results(out, per="round")
    assert [one["virtual_seconds"] for one in rounds[:2]] == times(Path(rounds[0]["folder"]))
    shown = CliRunner().invoke(app, ["sweep", "show", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "device" in shown.output
    assert "energy" in shown.output


def test_results_without_devices_have_no_such_columns(tmp_path: Path) -> None:
    data = fedge.data.from_arrays([[0.0] * 4] * 6, [0, 1, 2] * 2, [[0.0] * 4], [1], classes=3)
    algorithm = fedge.FedAvg(fedge.models.logistic(4, 3, seed=0))
    fedge.train(algorithm, fedge.Federation(data, [range(6)]), rounds=1, out=tmp_path / "run")
    assert not {"virtual_seconds", "joules", "best_round"} & fedge.results(tmp_path / "run")[0].keys()


def test_a_field_of_the_devices_can_be_swept(tmp_path: Path) -> None:
    out = run(tmp_path / "swept", "seed = 0", "spread = {sweep = [1.0, 10.0]}")
    found = [times(folder) for folder in sorted(out.glob("fedavg-*"))]
    assert len(found) == 2
    assert found[0] != found[1]


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_asynchronous_training_in_a_sweep(tmp_path: Path, jobs: str) -> None:
    out = run(tmp_path / "swept", "seeds = [0, 1]", "", FEDBUFF, "--jobs", jobs)
    found = [times(folder) for folder in out.glob("fedbuff*")]
    assert len(found) == 2
    assert all(len(one) == 2 for one in found)


def test_a_table_with_seconds_and_joules_fits_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "mine.toml").write_text(
        FILE.format(train="seed = 0", edge="", algorithm='label = "FedOVA with a long name"\n' + FEDAVG)
        + '\n[[algorithm]]\nname = "fedavg"\nlr = 0.01\n'
    )
    done = CliRunner().invoke(
        app, ["run", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "runs"), "--set", "target=0.2"]
    )
    shown = [line for line in done.output.splitlines() if not line.startswith("no room for ")]
    table = [line for line in shown if "energy" in line or line.startswith(("fedavg", "FedOVA"))]
    assert done.exit_code == 0, done.output
    assert any("energy" in line for line in table), done.output
    row = next(line for line in table if line.startswith("fedavg ") and len(line.split()) > 6)
    reached = to_target(read(tmp_path / "runs" / "fedavg"), 0.2)
    assert reached is not None
    assert row.split()[-2:] == [f"{reached.virtual_seconds:.3g}", f"{reached.joules:.3g}"], done.output
    missing = done.output.partition("no room for ")[2].partition(":")[0]
    assert {"time s", "device s", "energy J"} <= set(missing.split(", "))
    assert max(len(line) for line in table) <= 80


def test_a_sweep_over_policies_is_written_and_read_again() -> None:
    """A list of words and tables: TOML has inline tables for it."""
    values = {"edge": {"policy": {"sweep": ["none", {"name": "deadline", "seconds": 0.5}]}}}
    assert toml.loads(toml.dump(values)) == values
