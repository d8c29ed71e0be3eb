"""`fedge deploy local`: TLS and keys, the simulator's numbers, the folder of `fedge run`, and nothing left over."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from fedge.deploy.folder import sweep
from fedge.deploy.process import listens
from fedge.runs import checkpoint
from tests.deploy.processes import Marked, running

pytestmark = pytest.mark.deploy


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Marked:
    return Marked(tmp_path_factory.mktemp("local"))


@pytest.fixture(scope="module")
def deployed(here: Marked) -> tuple[Path, str]:
    """Three rounds of FedOVA on three nodes, and what was printed."""
    done = here.run("fedge", "deploy", "local", "--nodes", "3", "--out", "deployed", "--no-report")
    assert done.returncode == 0, done.stdout + done.stderr
    return here.folder / "deployed", done.stdout


@pytest.fixture(scope="module")
def simulated(here: Marked, deployed: tuple[Path, str]) -> Path:
    """The very experiment, simulated."""
    done = here.run("fedge", "run", "deployed/experiment.toml", "--out", "simulated", "--no-report")
    assert done.returncode == 0, done.stdout + done.stderr
    return here.folder / "simulated"


def leaves(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in leaves(value)]
    return [leaf for value in state for leaf in leaves(value)] if isinstance(state, list | tuple) else [state]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def same_parameters(deployed: Path, simulated: Path) -> None:
    ours, theirs = (leaves(checkpoint.load(out / "fedova/checkpoint.pt")["state"]) for out in (deployed, simulated))
    gap = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True) if hasattr(a, "abs"))
    print(f"deployed and simulated differ by {gap:.1e}")
    assert gap < 1e-6


def test_parameters_equal_the_simulators(deployed: tuple[Path, str], simulated: Path) -> None:
    same_parameters(deployed[0], simulated)


def test_the_run_folder_is_identical_in_form(deployed: tuple[Path, str], simulated: Path) -> None:
    ours, theirs = deployed[0] / "fedova", simulated / "fedova"
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    assert (ours / "config.toml").read_text() == (theirs / "config.toml").read_text()
    assert (ours / "clients.json").read_text() == (theirs / "clients.json").read_text()
    for name in ("rounds.jsonl", "ledger.jsonl"):
        mine = [[key for key in line if key != "phases"] for line in lines(ours / name)]  # times of a real fleet
        assert mine == [list(line) for line in lines(theirs / name)]
    assert list(json.loads((ours / "summary.json").read_text())) == list(
        json.loads((theirs / "summary.json").read_text())
    )
    for mine, other in zip(lines(ours / "ledger.jsonl"), lines(theirs / "ledger.jsonl"), strict=True):
        assert mine.pop("wire_down") > mine["down"]
        assert mine.pop("wire_up") > mine["up"]
        assert other.pop("wire_down") is other.pop("wire_up") is None
        assert mine == other
    for mine, other in zip(lines(ours / "rounds.jsonl"), lines(theirs / "rounds.jsonl"), strict=True):
        for key in ("round", "cohort", "up_bytes", "down_bytes", "dropped", "test_accuracy"):
            assert mine[key] == other[key]


def test_it_says_what_it_does(deployed: tuple[Path, str]) -> None:
    text = deployed[1]
    for words in ("3 of 3 nodes are connected", "round 3/3", "wire", "A phase took", "TLS and node keys"):
        assert words in text


def test_nothing_is_left_behind(here: Marked, deployed: tuple[Path, str]) -> None:
    port = re.search(r"127\.0\.0\.1:(\d+)", deployed[1])
    assert port is not None
    assert not listens(int(port[1]))
    here.assert_clean()


def test_ctrl_c_stops_the_run_and_the_fleet_and_resume_goes_on(here: Marked) -> None:
    """After a round it stops at the end of the phase, with a checkpoint; the fleet and its keys are gone.

    Resumed, the rounds that were done are not done again, and the end is the simulator's.
    """
    words = ["fedge", "deploy", "local", "--nodes", "2", "--out", "stopped", "--no-report", "--set", "train.rounds=4"]
    process = here.start(*words, "--set", "algorithm.epochs=1")
    try:
        here.until(process, lambda: len(lines_so_far(here.folder / "stopped/fedova/rounds.jsonl")) >= 1, 150)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Stopping after this phase" in errors
    assert "fedge deploy local --resume --out stopped" in errors
    done = checkpoint.load(here.folder / "stopped/fedova/checkpoint.pt")["round"]
    before = lines_so_far(here.folder / "stopped/fedova/rounds.jsonl")
    assert done == len(before) in (1, 2, 3)
    here.assert_clean()
    resumed = here.run("fedge", "deploy", "local", "--resume", "--out", "stopped", "--no-report")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    after = lines_so_far(here.folder / "stopped/fedova/rounds.jsonl")
    assert after[:done] == before
    assert [json.loads(line)["round"] for line in after] == [1, 2, 3, 4]
    assert any("went on from its checkpoint" in fault for fault in json.loads(after[done])["faults"])
    here.assert_clean()
    again = here.run("fedge", "run", "stopped/experiment.toml", "--out", "unstopped", "--no-report")
    assert again.returncode == 0, again.stdout + again.stderr
    same_parameters(here.folder / "stopped", here.folder / "unstopped")


def lines_so_far(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_sigterm_while_it_starts_leaves_nothing(here: Marked) -> None:
    process = here.start("fedge", "deploy", "local", "--nodes", "1", "--out", "ended", "--no-report")
    try:
        here.until(process, lambda: any(here.temporary.glob("fedge-fleet-*/keys/node-0.key")), 60)
        time.sleep(2)
        process.terminate()
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    here.assert_clean()


def test_killed_with_9_it_leaves_no_process(here: Marked) -> None:
    """Every part ends with its parent, the server app at once. The folder with the keys goes at the next start."""
    process = here.start("fedge", "deploy", "local", "--nodes", "1", "--out", "killed", "--no-report")
    try:
        here.until(process, lambda: len(lines_so_far(here.folder / "killed/fedova/rounds.jsonl")) >= 1, 150)
        assert any("flwr-serverapp" in words for words in running(here.mark).values())
        assert not any("--token " in words for words in running(here.mark).values())
        process.kill()
        begin = time.monotonic()
        process.communicate(timeout=60)
        here.assert_no_process()
        print(f"everything had ended after {time.monotonic() - begin:.1f} s")
    finally:
        process.kill()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(here.temporary))
        sweep()
    here.assert_clean()


def test_bad_requests_are_refused_before_anything_starts(here: Marked) -> None:
    for words, message in (
        (["--set", "train.cohort=20"], "cohort is 20, but there are only 3 clients"),
        (["missing.toml"], "there is no file missing.toml"),
        (["--resume", "--out", "nowhere"], "there is nothing to resume"),
    ):
        done: subprocess.CompletedProcess[str] = here.run("fedge", "deploy", "local", *words)
        assert done.returncode == 2, done.stdout + done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    here.assert_clean()


def test_parts_of_the_users_own(here: Marked) -> None:
    """Nodes and server app find mine.py, the run is that of the simulator, and it goes on from its folder alone."""
    example = Path(__file__).parent.parent.parent / "examples" / "own_parts"
    for name in ("mine.py", "pumps.csv"):
        (here.folder / name).write_text((example / name).read_text())
    short = "PUMPS, STEPS = 40, 16"
    text = (here.folder / "mine.py").read_text()
    assert short in text
    loader = "    rows = [row for row in rows if row['pump'] in ('pump-1', 'pump-2')]\n    owner ="
    (here.folder / "mine.py").write_text(text.replace("    owner =", loader, 1))
    (here.folder / "own.toml").write_text(
        (example / "pumps.toml").read_text().split('[[algorithm]]\nname = "fedavg"')[0]
    )
    words = ["own.toml", "--out", "own", "--no-report", "--set", "train.rounds=2", "--set", "train.cohort=2"]
    done = here.run("fedge", "deploy", "local", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    words[2] = "own-simulated"
    assert here.run("fedge", "run", *words).returncode == 0
    more = ["--resume", "--no-report", "--set", "train.rounds=3"]
    for command in (["fedge", "deploy", "local", "--out", "own"], ["fedge", "run", "--out", "own-simulated"]):
        done = here.run(*command, *more)
        assert done.returncode == 0, done.stdout + done.stderr
    found = [
        leaves(checkpoint.load(here.folder / out / "spring/checkpoint.pt")["state"]) for out in ("own", "own-simulated")
    ]
    assert max(float((a - b).abs().max()) for a, b in zip(*found, strict=True)) < 1e-5
