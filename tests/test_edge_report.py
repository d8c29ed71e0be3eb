"""What is seen of the devices: the report, the table of a run, and `fedge edge show`."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fedge
from benchmarks.edge import fairness
from fedge.cli.app import app
from fedge.cli.edge import histogram
from fedge.edge import Profiles, Table
from fedge.experiment import ExperimentError, compare, parse
from fedge.report import read, to_target, write_report
from fedge.report.figures import pictures
from fedge.report.page import Goal, page
from fedge.report.read import RunFolder
from fedge.report.series import curve, elapsed
from fedge.report.summary import columns
from tests.test_edge import TOML

EDGE = """
[edge]
profile = ["phone", "raspberry_pi"]
spread = 10
policy = {name = "first_of", count = 4}
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("runs")
    timed, plain = (
        compare(parse(tomllib.loads(TOML + more)), out / name)[0] for name, more in (("a", EDGE), ("b", ""))
    )
    return {"timed": timed.folder, "plain": plain.folder}


def test_curves_against_time_and_energy(folders: dict[str, Path]) -> None:
    run, plain = read(folders["timed"]), read(folders["plain"])
    seconds = [record["virtual_seconds"] for record in run.rounds]
    assert elapsed(run, "virtual_seconds") == pytest.approx(np.cumsum(seconds).tolist())
    found = curve(run, "test_accuracy", "joules")
    assert found.x == pytest.approx(np.cumsum([record["joules"] for record in run.rounds]).tolist())
    assert found.y == [record["test_accuracy"] for record in run.rounds]
    assert curve(plain, "test_accuracy", "joules").x == []
    names = [picture.name for picture in pictures([run, plain], 0.2)]
    assert {"accuracy_virtual_seconds", "accuracy_joules", "timeline"} <= set(names)
    assert "timeline_2" not in names
    bare = [picture.name for picture in pictures([plain], 0.2)]
    assert not [name for name in bare if "virtual" in name or "joules" in name or "timeline" in name]


def test_one_time_line_per_configuration_and_which_they_are(folders: dict[str, Path], tmp_path: Path) -> None:
    run = read(folders["timed"])

    def like(lr: float, seed: int) -> RunFolder:
        train, algorithm = run.config["train"] | {"seed": seed}, run.config["algorithm"] | {"lr": lr}
        config = run.config | {"train": train, "algorithm": algorithm}
        return replace(run, path=tmp_path / f"{lr}-{seed}", label=f"lr={lr} seed={seed}", config=config)

    few, many = ([like(0.1 * n, seed) for n in range(1, most) for seed in (0, 1)] for most in (3, 7))
    captions = [one.caption for one in pictures(few) if one.name.startswith("timeline")]
    assert [caption.split(" of ")[1] for caption in captions] == [
        "lr=0.1 seed=0, client by client",
        "lr=0.2 seed=0, client by client",
    ]
    assert len([one for one in pictures(many) if one.name.startswith("timeline")]) == 4
    told = "Time lines of the first run of every configuration; rounds.jsonl of each of the 4 runs has its own."
    assert told in page(few, [(one, "<svg></svg>") for one in pictures(few)], Goal(None))
    told = "Time lines of the first run of the first 4 of 6 configurations; rounds.jsonl of each of the 12 runs"
    assert told in page(many, [(one, "<svg></svg>") for one in pictures(many)], Goal(None))
    assert "Time lines" not in page([run], [(one, "<svg></svg>") for one in pictures([run])], Goal(None))


def test_what_it_took_to_a_target(folders: dict[str, Path]) -> None:
    run = read(folders["timed"])
    goal = run.rounds[2]["test_accuracy"]
    at = next(place for place, record in enumerate(run.rounds) if record["test_accuracy"] >= goal)
    found = to_target(run, goal)
    assert found is not None
    assert found.virtual_seconds == pytest.approx(sum(r["virtual_seconds"] for r in run.rounds[: at + 1]))
    assert found.joules == pytest.approx(sum(r["joules"] for r in run.rounds[: at + 1]))
    without = to_target(read(folders["plain"]), 0.01)
    assert without is not None
    assert without[3:] == (None, None)


def test_the_page_has_seconds_joules_and_kinds(folders: dict[str, Path], tmp_path: Path) -> None:
    text = write_report([folders["timed"]], tmp_path / "page").read_text()
    for words in ("seconds on the devices", "joules", "On the devices", "raspberry_pi", "client by client"):
        assert words in text
    plain = write_report([folders["plain"]], tmp_path / "plain").read_text()
    assert "joules" not in plain
    assert "On the devices" not in plain


def test_run_prints_seconds_and_joules(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(TOML)
    words = ["run", str(tmp_path / "small.toml"), "--out", str(tmp_path / "out"), "--no-report"]
    found = CliRunner().invoke(app, [*words, "--set", "edge.profile=phone", "--json"])
    assert found.exit_code == 0, found.output
    (row,) = json.loads(found.stdout)["runs"]
    assert row["virtual_seconds"] > 0
    assert row["joules"] > 0
    assert "energy" in found.stderr


def test_devices_without_watts_have_no_energy_in_the_table(tmp_path: Path) -> None:
    """0 J would read as a result."""
    (tmp_path / "devices.csv").write_text("flops,down,up\n1e9,1e6,1e6\n")
    words = ["run", "--out", str(tmp_path / "out"), "--no-report"]
    settings = [f"edge.file={tmp_path / 'devices.csv'}", "train.rounds=1", "target=0.01"]
    found = CliRunner().invoke(app, [*words, *(part for one in settings for part in ("--set", one))])
    assert found.exit_code == 0, found.output
    shown = [line.split() for line in found.output.splitlines() if line.startswith("FedAvg  ")]
    assert shown[0][-1] == "–"
    assert "energy" in found.output
    (run,) = [read(folder.parent) for folder in sorted((tmp_path / "out").glob("fedavg/rounds.jsonl"))]
    assert sum(record["joules"] for record in run.rounds) == 0
    told = {column.title: column.value(run) for column in columns(0.01)}
    assert {value for title, value in told.items() if title.startswith("joules")} == {None}
    assert all(value for title, value in told.items() if title.startswith("seconds on the devices"))


def test_edge_show(tmp_path: Path) -> None:
    words = ["edge", "show", "--set", "edge.spread=10", "--set", "partition.clients=60"]
    files = ["--out", str(tmp_path / "d.png"), "--csv", str(tmp_path / "d.csv")]
    found = CliRunner().invoke(app, [*words, *files])
    assert found.exit_code == 0, found.output
    assert "phone" in found.stdout
    assert f"Written  {tmp_path / 'd.csv'}, {tmp_path / 'd.png'}" in found.stdout
    assert (tmp_path / "d.png").stat().st_size > 1000
    again = Table(str(tmp_path / "d.csv"), 60).devices(np.arange(60))
    assert again.flops.tolist() == Profiles("phone", spread=10.0).devices(np.arange(60)).flops.tolist()
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert told["kinds"]["phone"]["devices"] == 60
    assert told["kinds"]["phone"]["flops"]["median"] == pytest.approx(np.median(again.flops))
    bad = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "d.nothing")])
    assert bad.exit_code != 0
    assert "cannot write" in bad.output


def test_histograms_are_logarithmic() -> None:
    assert histogram(np.full(3, 2.0)) == "all 2"
    drawn = histogram(np.array([1.0, 10.0, 10.0, 100.0]), columns=3)
    assert drawn == "1 |▄█▄| 100"


def test_setup_belongs_to_the_first_round(tmp_path: Path) -> None:
    """Sharing data takes time before the first round, and only once."""
    data = fedge.data.load("digits")
    federation = fedge.Federation(data, fedge.partition.iid(data.train_y, clients=10, seed=0))
    algorithm = fedge.DataSharing(fedge.FedAvg(fedge.models.logistic(64, 10)), beta=0.5)
    fleet = Profiles("phone")
    link = fedge.edge.Clock(fedge.Engine().link(algorithm, federation), federation, fleet)
    run = fedge.train(algorithm, federation, rounds=2, link=link)
    shared = run.ledger[0].down / 10 * 8 / 13e6
    assert run.history[0]["virtual_seconds"] - run.history[1]["virtual_seconds"] == pytest.approx(shared)


def test_the_page_of_fairness_says_what_is_stored() -> None:
    """If not: `python -m benchmarks.edge.fairness`."""
    page = fairness.PAGE.read_text("utf-8")
    assert fairness.text(page) == page
    known = {(line["method"], line["policy"], line["seed"]) for line in fairness.lines()}
    assert known == {(m, p, s) for m in fairness.METHODS for p in fairness.POLICIES for s in fairness.SEEDS}


def test_old_phones_are_those_of_the_clients_with_a_nought_or_a_one(tmp_path: Path) -> None:
    data = fedge.data.load("digits")
    where = fedge.Federation(data, fedge.partition.labels_per_client(data.train_y, 100, labels=2, seed=1))
    devices = fairness.fleet(where, tmp_path).devices(np.arange(100))
    old = [bool({0, 1} & set(data.train_y[where.examples(k)].tolist())) for k in range(100)]
    speeds = {kind: {float(devices.flops[k]) for k in range(100) if old[k] is kind} for kind in (True, False)}
    assert [len(one) for one in speeds.values()] == [1, 1]
    assert speeds[False].pop() == pytest.approx(10 * speeds[True].pop())


@pytest.mark.parametrize(("columns", "totals"), [(70, False), (140, True)])
def test_the_table_of_a_run_has_seconds_and_joules_to_the_target(
    columns: int, totals: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    (tmp_path / "small.toml").write_text(TOML)
    words = ["run", str(tmp_path / "small.toml"), "--out", str(tmp_path / "out"), "--no-report"]
    found = CliRunner().invoke(app, [*words, "--set", "edge.profile=phone", "--json"])
    assert found.exit_code == 0, found.output
    (row,) = json.loads(found.stdout)["runs"]
    lines = found.stderr.splitlines()
    titles = next(line for line in lines if "device s  energy J" in line)
    assert ("energy  device s" in titles) is totals
    shown = next(line for line in lines if line.startswith(row["label"]) and "round" not in line).split()
    told = [f"{row[f'{name}_to_target']:.3g}" for name in ("virtual_seconds", "joules")]
    assert told == (shown[-3:-1] if totals else shown[-2:])


def test_edge_show_says_what_is_wrong_and_what_is_left_out(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["edge", "show", "--set", f"edge.file={tmp_path / 'none.csv'}"])
    assert (found.exit_code, found.exception.__class__) == (2, SystemExit)
    assert f"Error: edge: cannot read the devices in {tmp_path / 'none.csv'}" in found.stderr.replace("\n", "")
    place = CliRunner().invoke(app, ["edge", "show", "--csv", str(tmp_path / "no" / "devices.csv")])
    assert (place.exit_code, place.exception.__class__) == (2, SystemExit)
    assert "No such file or directory; choose another place" in place.stderr.replace("\n", " ")
    many = CliRunner().invoke(app, ["edge", "show", "--set", "partition.clients=100001"])
    assert "These are the first 100,000 of 100,001 devices" in many.stdout


def test_a_policy_for_a_server_that_waits_for_nobody_is_refused_before_any_run(tmp_path: Path) -> None:
    waits = TOML.replace("[algorithm]", "[[algorithm]]") + '\n[[algorithm]]\nname = "fedbuff"\nbuffer = 2\n'
    waits += '[algorithm.inner]\nname = "fedavg"\nepochs = 1\n[edge]\npolicy = {name = "deadline", seconds = 1}\n'
    told = r"fedbuff: FedBuff waits for nobody, but in \[edge\] policy is Deadline\(seconds=1\): leave it out"
    with pytest.raises(ExperimentError, match=told):
        compare(parse(tomllib.loads(waits)), tmp_path / "out")
    assert not (tmp_path / "out").exists()
