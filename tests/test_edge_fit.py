"""From logged times back to devices: exact on times that a known fleet would have logged."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedge.cli.app import app
from fedge.edge import Table
from fedge.edge.fit import fit, read
from fedge.edge.table import write
from fedge.experiment import compare, flops_of, parse
from tests.test_edge import TOML

SPEED = np.array([1e6, 2e6, 5e5, 4e6])  # FLOP/s
START, BEGIN = np.array([0.5, 0.2, 0.1, 0.3]), 1.5


def logged(flops: dict, sizes: list[float], per_byte: float, noise: float = 0.0) -> list[dict[str, Any]]:
    """Records as a fleet of these four nodes writes them."""
    rng, records = np.random.default_rng(0), []
    for (round, phase), work in flops.items():
        size = sizes[round % len(sizes)]
        clients = [
            [k, START[k], done / SPEED[k] * np.exp(noise * rng.normal()), size, size] for k, done in work.items()
        ]
        seconds = BEGIN + 2 * size * per_byte + max(start + spent for _, start, spent, _, _ in clients)
        records.append(
            {"round": round, "phases": [{"round": round, "phase": phase, "seconds": seconds, "clients": clients}]}
        )
    return records


FLOPS = {(r, 0): {k: float((k + 1 + r) * 1e6) for k in range(4) if (k + r) % 3} for r in range(1, 13)}


def test_the_devices_that_made_the_times_are_found_again() -> None:
    found = fit(read(logged(FLOPS, [1e4, 5e4, 2e5], 1e-6)), FLOPS)
    assert found.clients == [0, 1, 2, 3]
    assert found.devices.flops == pytest.approx(SPEED)
    assert found.devices.latency == pytest.approx(BEGIN + START)
    assert found.devices.up == pytest.approx(8 / 1e-6)
    assert found.predicted == pytest.approx(found.measured)
    assert found.error < 1e-12


def test_rounds_are_predicted_by_devices_that_were_fitted_to_the_others() -> None:
    noisy = logged(FLOPS, [1e5], 1e-6, noise=0.3)
    found = fit(read(noisy), FLOPS)
    for at in range(len(noisy)):
        rest = fit(read(noisy[:at] + noisy[at + 1 :]), FLOPS).devices
        phase = noisy[at]["phases"][0]
        work = FLOPS[phase["round"], 0]
        taken = [rest.latency[k] + work[k] / rest.flops[k] + 8 * 2e5 / rest.down[k] for k, *_ in phase["clients"]]
        assert found.ahead[at] == pytest.approx(max(taken), rel=1e-12)
    gaps = np.abs(np.array(found.ahead, dtype=float) / np.array(found.measured) - 1)
    assert found.error_ahead == pytest.approx(float(np.median(gaps)))
    assert found.error_ahead != pytest.approx(found.error, rel=1e-3)


def test_what_no_device_computes_so_slowly_is_latency(tmp_path: Path) -> None:
    """A few FLOPs in seconds are a process at work, and such a file of devices would be refused as one in GFLOP/s."""
    slow = {at: dict.fromkeys(work, 10.0) for at, work in FLOPS.items()}
    records = logged(slow, [1e5], 1e-6)
    for record in records:
        for entry in record["phases"][0]["clients"]:
            entry[2] = 2.0
        record["phases"][0]["seconds"] = 5.0
    found = fit(read(records), slow)
    assert found.devices.flops.tolist() == [1e5] * 4
    assert found.predicted == pytest.approx(found.measured, rel=0.1)
    write(tmp_path / "d.csv", found.devices, ("node",))
    assert Table(str(tmp_path / "d.csv"), 4).rows[0].tolist() == [1e5] * 4


def test_a_round_with_a_client_of_no_other_round_is_not_predicted() -> None:
    flops = {(1, 0): {0: 1e6, 1: 1e6}, (2, 0): {0: 2e6}, (3, 0): {0: 1e6}}
    found = fit(read(logged(flops, [1e5], 1e-6)), flops)
    assert found.ahead[0] is None
    assert found.ahead[1:] == pytest.approx(found.measured[1:])
    assert fit(read(logged({(1, 0): {0: 1e6}}, [1e5], 1e-6)), {(1, 0): {0: 1e6}}).error_ahead is None


LIES = {
    "no work": [1.0, 0.0], "less than none": [-1e6, -1.0], "for ever": [0.1, 1e300], "an instant": [0.0, -5e-324],
    "next to no work": [0.0, 5e-324], "too little work": [0.1, 1e-7], "a late start": [8e307, 1e-300],
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_node_that_says_absurd_times_spoils_its_own_device_alone(name: str) -> None:
    records = logged(FLOPS, [1e5], 1e-6)
    for record in records:
        for entry in record["phases"][0]["clients"]:
            if entry[0] == 3:
                entry[1:3] = LIES[name]
    found = fit(read(records), FLOPS)
    assert found.clients == [0, 1, 2]
    assert found.devices.flops == pytest.approx(SPEED[:3])
    assert (found.devices.latency >= 0).all()


@pytest.mark.parametrize("phases", [3, [7], [{}], [{"round": 1, "phase": 0, "seconds": "x", "clients": []}], None])
def test_phases_that_are_none_are_left_out(phases: Any) -> None:
    assert read([{"round": 1, "phases": phases}]) == []


@pytest.mark.parametrize(("key", "value"), [("seconds", 1e308), ("bytes", 1e308)])
def test_damaged_logs_give_devices_that_can_be_read_again(key: str, value: float, tmp_path: Path) -> None:
    records = logged(FLOPS, [1e5, 2e5], 1e-6)
    phase = records[0]["phases"][0]
    if key == "seconds":
        phase[key] = value
    else:
        phase["clients"][0][3] = value
    with np.errstate(all="raise"):
        found = fit(read(records), FLOPS)
    write(tmp_path / "d.csv", found.devices, ("node",))
    assert len(Table(str(tmp_path / "d.csv"), 4).rows.T) == 4


def test_phases_of_no_round_of_the_run_are_left_out() -> None:
    """One number in a record would have a thousand million rounds simulated."""
    records = logged(FLOPS, [1e5], 1e-6)
    wanted = read(records)
    records[3]["phases"].append(records[3]["phases"][0] | {"round": 10**9})
    records[4]["phases"].append(records[4]["phases"][0] | {"round": -1})
    far = {"round": 10**9, "phases": [records[0]["phases"][0] | {"round": 10**9}]}
    assert read([*records, far], len(records) + 1) == wanted
    setup = records[0]["phases"][0] | {"round": 0}
    records[0]["phases"].insert(0, setup)
    assert [one.at for one in read(records, len(records))] == [(0, 0), *(one.at for one in wanted)]


def test_messages_of_one_size_say_nothing_about_rates() -> None:
    found = fit(read(logged(FLOPS, [1e5], 1e-6)), FLOPS)
    assert found.devices.latency == pytest.approx(BEGIN + 2e5 * 1e-6 + START)
    assert found.predicted == pytest.approx(found.measured)


def test_noise_is_averaged() -> None:
    found = fit(read(logged(FLOPS, [1e5], 1e-6, noise=0.2)), FLOPS)
    assert found.devices.flops == pytest.approx(SPEED, rel=0.3)
    assert 0 < found.error < 0.2


def test_phases_in_which_a_node_was_lost_are_left_out() -> None:
    records = logged(FLOPS, [1e5], 1e-6)
    records[0]["phases"][0]["clients"][0][2] = records[0]["phases"][0]["clients"][0][4] = 0.0
    records[0]["phases"][0]["seconds"] = 60.0  # until it was given up
    assert len(read(records)) == len(records) - 1
    assert fit(read(records), FLOPS).devices.flops == pytest.approx(SPEED)
    with pytest.raises(ValueError, match="no phase with times of nodes"):
        fit(read(records), {})


def test_work_is_counted_by_a_simulation() -> None:
    """64 inputs, 10 outputs: 2 * 640 FLOPs forwards and as many for the weights, per example; one epoch."""
    experiment = parse(tomllib.loads(TOML))
    flops = flops_of(experiment)
    assert list(flops) == [(r, 0) for r in range(1, 5)]
    assert all(len(work) == 6 for work in flops.values())
    assert {done % (4 * 640) for work in flops.values() for done in work.values()} == {0.0}


def test_the_command_writes_a_file_of_devices(tmp_path: Path) -> None:
    (outcome,) = compare(parse(tomllib.loads(TOML)), tmp_path / "runs")
    bare = CliRunner().invoke(app, ["edge", "fit", str(outcome.folder)])
    assert bare.exit_code != 0
    assert "has no times of nodes" in bare.output
    flops = flops_of(parse(tomllib.loads(TOML)))
    rounds = outcome.folder / "rounds.jsonl"
    times = [
        {
            "round": r,
            "phase": 0,
            "seconds": 3.0,
            "clients": [[k, 0.5, done / 1e6, 100, 100] for k, done in work.items()],
        }
        for (r, _), work in flops.items()
    ]
    lines = [
        json.loads(line) | {"phases": [one]} for line, one in zip(rounds.read_text().splitlines(), times, strict=True)
    ]
    rounds.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["edge", "fit", str(outcome.folder), "--out", str(tmp_path / "d.csv")]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert "3.00 s per round measured" in found.output
    assert "what sending costs per byte cannot be told" in " ".join(found.output.split())
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    table = Table(str(tmp_path / "d.csv"), 20).devices(np.arange(20))
    assert table.flops == pytest.approx(1e6)
    assert len(told["measured"]) == 4
    lines[0]["phases"] += [times[0] | {"round": 10**9}]
    lines[1] |= {"round": 10**9, "phases": [times[1] | {"round": 10**9}]}
    rounds.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["measured"]) == 3
    nowhere = CliRunner().invoke(app, ["edge", "fit", str(tmp_path)])
    assert "holds no config.toml" in nowhere.output


def test_an_asynchronous_run_on_a_fleet_has_no_phases_and_is_told_so(tmp_path: Path) -> None:
    (outcome,) = compare(parse(tomllib.loads(TOML)), tmp_path / "runs")
    rounds = outcome.folder / "rounds.jsonl"
    lines = [json.loads(line) | {"answers": [[0, 3, {"0": 0}, 1.5]]} for line in rounds.read_text().splitlines()]
    rounds.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = CliRunner().invoke(app, ["edge", "fit", str(outcome.folder)])
    said = " ".join(found.output.replace("│", " ").split())
    assert found.exit_code != 0
    assert "was asynchronous" in said
    assert "fit a run of the inner algorithm on the same fleet" in said
    assert "must come from a real fleet" not in said


def test_clients_that_nobody_saw_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {at: {k: done for k, done in work.items() if k != 1} for at, work in FLOPS.items()}
    seen = {at: work for at, work in seen.items() if work}
    for flops, told in ((seen, True), (FLOPS, False)):
        fitted = fit(read(logged(flops, [1e4, 5e4], 1e-6)), flops)
        monkeypatch.setattr("fedge.cli.edge.fit_run", lambda *_, fitted=fitted: fitted)
        done = CliRunner().invoke(app, ["edge", "fit", "run", "--out", str(tmp_path / "devices.csv")])
        assert done.exit_code == 0
        assert "cannot be told" not in done.output
        assert ("No times of clients 1: the file has fewer rows" in done.output) == told
