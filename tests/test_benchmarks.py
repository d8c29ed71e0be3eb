"""Every command of benchmarks/README.md in a short form, so that none stops working unnoticed."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import benchmarks.algorithms.__main__ as algorithms
import benchmarks.attacks.__main__ as attacks
import benchmarks.edge.__main__ as edge
import benchmarks.privacy.__main__ as privacy
import benchmarks.theory.__main__ as theory
import benchmarks.uploads.__main__ as uploads
import fedge
from benchmarks import (
    graphs,
    kill_and_resume,
    kill_reproduce,
    layers,
    loop,
    million_clients,
    newcomers,
    processors,
    ranks,
    readme,
    scaling,
    speed,
    uneven,
)
from benchmarks.algorithms import measure as algorithms_measure
from benchmarks.algorithms import page as algorithms_page
from benchmarks.attacks import page as attacks_page
from benchmarks.edge import choice as edge_choice
from benchmarks.edge import measure as edge_measure
from benchmarks.edge import page as edge_page
from benchmarks.edge import partial as edge_partial
from benchmarks.edge import picture as edge_picture
from benchmarks.edge import timed as edge_timed
from benchmarks.edge import yours as edge_yours
from benchmarks.privacy import measure as privacy_measure
from benchmarks.privacy import page as privacy_page
from benchmarks.speed import gpu, peers
from benchmarks.speed import page as speed_page
from benchmarks.speed import table as speed_table
from benchmarks.speed.peers import compare
from benchmarks.theory import bytes as moved
from benchmarks.theory import constants, convex, newton, nonconvex, store
from benchmarks.theory import page as theory_page
from benchmarks.uploads import measure as uploads_measure
from benchmarks.uploads import page as uploads_page
from fedge.bench import WORKLOADS
from fedge.engine import Simulator, folding
from fedge.engine.recording import recorder
from fedge.engine.recording.c_library import there_is_a_compiler
from fedge.engine.ways import WAYS
from tests import paper

ROOT = Path(__file__).parents[1]
# Short forms that have a module of their own.
ELSEWHERE = {
    "rounds": "test_rounds.py", "paper": "test_paper.py", "curvature": "test_curvature_page.py",
    "diet": "test_diet.py", "new_class": "test_new_class.py",
}  # fmt: skip


class Smaller:
    """Other values for a module's constants, and a command line, until the test ends."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch

    def __call__(self, module: ModuleType, **values: Any) -> None:
        for name, value in values.items():
            self.patch.setattr(module, name, value)

    def run(self, main: Callable[[], None], *words: str) -> int:
        self.patch.setattr(sys, "argv", [main.__module__, *words])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0


@pytest.fixture
def smaller(monkeypatch: pytest.MonkeyPatch) -> Smaller:
    return Smaller(monkeypatch)


def copied(path: Path, folder: Path) -> Path:
    return Path(shutil.copy(path, folder))


def test_every_command_has_a_short_form() -> None:
    table = (ROOT / "benchmarks/README.md").read_text()
    named = set(re.findall(r"`python -m benchmarks\.(\w+)", table))
    there = {path.parent.name for path in ROOT.glob("benchmarks/*/__main__.py")}
    there |= {path.stem for path in ROOT.glob("benchmarks/*.py") if "__main__" in path.read_text()}
    assert named == there
    here = {name.removeprefix("test_") for name in globals()}
    assert named - here - set(ELSEWHERE) == set()
    for name, module in ELSEWHERE.items():
        assert f"benchmarks.{name}" in (ROOT / "tests" / module).read_text()


def test_theory(smaller: Smaller, tmp_path: Path) -> None:
    """All parts, a few short runs each, into a copy of the page; optimum and race are in tests/test_theory.py."""
    stored, giant = store.load("convex"), newton.gaps
    few = {name: [{}] for name in convex.NOISE}
    smaller(store, RESULTS=tmp_path)
    smaller(theory_page, PAGE=copied(theory_page.PAGE, tmp_path))
    smaller(convex, ROUNDS=31, LAST=5, EXACT_ROUNDS=12, FORM_ROUNDS=2, NOISE=few)
    smaller(convex, minimum=lambda f: stored["optimum"], race=lambda *_: stored["race"])
    smaller(constants, RUNS={"short": {"rounds": 6, "cohort": 2, "lr": 0.5, "batches": 1}})
    smaller(newton, RUNS=newton.RUNS[:1], minimum=lambda f: stored["optimum"])
    smaller(newton, gaps=lambda *where, **options: giant(*where[:-1], 1, **options | {"iterations": 2}))
    smaller(nonconvex, ROUNDS=5, LAST=3, STEPS=(0.3,))
    smaller(moved, measure=lambda: [moved.row(*pair, 10) for pair in moved.algorithms().items()])
    theory.main([])
    parts = {"convex.json", "constants.json", "newton.json", "nonconvex.json", "bytes.json"}
    assert {path.name for path in tmp_path.glob("*.json")} == parts
    assert {path.name for path in tmp_path.glob("*.png")} >= {"convex.png", "forms.png", "nonconvex.png", "bytes.png"}
    text = theory_page.PAGE.read_text()
    assert theory_page.filled(text) == text


def test_algorithms(smaller: Smaller, tmp_path: Path) -> None:
    smaller(algorithms_page, PAGE=tmp_path / "page.md", RESULTS=tmp_path / "results.jsonl")
    smaller(algorithms_measure, ROUNDS=2, TUNING_ROUNDS=1, COHORT=3)
    smaller(algorithms, METHODS=algorithms.METHODS[:1], SEEDS=(0, 1))
    algorithms.measure()
    lines = algorithms_page.load()
    assert [line["kind"] for line in lines] == ["config"] + ["trial"] * 6 + ["run"] * 2
    assert 0 < lines[-1]["final"] <= 1


def test_uploads(smaller: Smaller, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = uploads_measure.Problem("digits", "mlp", 1, 1, 10, 0.2, (0,))
    results = tmp_path / "results.jsonl"
    smaller(uploads_measure, PROBLEMS={"digits": tiny}, RESULTS=tmp_path)
    smaller(uploads_measure, lines=lambda lines=uploads_measure.lines: lines(results))
    smaller(uploads_page, PROBLEMS={"digits": tiny}, PAGE=copied(uploads_page.PAGE, tmp_path))
    smaller(uploads_page, lines=uploads_measure.lines)
    smaller.run(uploads.main, "digits")
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(found) == len(uploads_measure.CODECS) + 2 * len(uploads_measure.RULES)
    assert all(0 < line["best"] <= 1 and line["up_bytes"] > 0 for line in found)
    smaller.run(uploads.main, "digits")
    assert len(results.read_text().splitlines()) == len(found), "nothing is done twice"
    smaller.run(uploads.main, "--page")
    assert "| Median |" in uploads_page.PAGE.read_text()


def test_the_page_of_uploads_says_what_was_stored() -> None:
    """If not: `python -m benchmarks.uploads --page`."""
    text = uploads_page.PAGE.read_text()
    assert uploads_page.codecs() in text
    assert uploads_page.rules() in text


def test_privacy(smaller: Smaller, tmp_path: Path) -> None:
    tiny = privacy_measure.Problem("digits", "mlp", 40, 10, 1, 1, 0.2, 1.0, (0.0, 1.0), (0,))
    results = tmp_path / "results.jsonl"
    smaller(privacy_measure, PROBLEMS={"digits": tiny}, RESULTS=tmp_path)
    smaller(privacy_measure, lines=lambda lines=privacy_measure.lines: lines(results))
    smaller(privacy_page, PROBLEMS={"digits": tiny}, PAGE=copied(privacy_page.PAGE, tmp_path))
    smaller(privacy_page, lines=privacy_measure.lines)
    smaller.run(privacy.main, "digits")
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["noise"] for line in found] == [None, 0.0, 1.0] * 2
    assert [line["epsilon"] is None for line in found] == [True, True, False] * 2
    smaller.run(privacy.main, "digits")
    assert len(results.read_text().splitlines()) == len(found), "nothing is done twice"
    smaller.run(privacy.main, "--page")
    assert f"| 1 | {found[2]['epsilon']:.2f} |" in privacy_page.PAGE.read_text()


def test_the_page_of_privacy_says_what_was_stored() -> None:
    """If not: `python -m benchmarks.privacy --page`."""
    text = privacy_page.PAGE.read_text()
    assert all(privacy_page.epsilons(problem) in text for problem in privacy_measure.PROBLEMS)
    assert len(privacy_measure.lines()) >= len(privacy_measure.entries("digits"))


def test_attacks(smaller: Smaller, tmp_path: Path) -> None:
    some = {"KINDS": ("scaled", "backdoor"), "DEFENCES": ("mean", "bounded_mean")}
    smaller(attacks, **some)
    smaller(attacks_page, RESULTS=tmp_path, PAGE=copied(attacks_page.PAGE, tmp_path), PROBLEMS=("digits",), **some)
    smaller.run(attacks.main, "digits", "--set", "train.rounds=1")
    found = attacks_page.lines("digits")
    assert len(found) == 4 * 2 * (1 + 2 * 2)  # algorithms, rules, honest or two attacks by two shares
    smaller.run(attacks.main, "digits", "--set", "train.rounds=1")
    assert attacks_page.lines("digits") == found, "nothing is done twice"
    smaller.run(attacks.main)
    assert "| FedOVA + spectral, 20 % lie | mean | bounded_mean |" in attacks_page.PAGE.read_text()


def test_the_page_of_attacks_says_what_was_stored() -> None:
    """If not: `python -m benchmarks.attacks`."""
    text = attacks_page.PAGE.read_text()
    assert all(attacks_page.tables(problem) in text for problem in attacks_page.PROBLEMS)
    assert attacks_page.worst("digits") in text
    assert "not run" not in attacks_page.tables("digits")


def test_edge(smaller: Smaller, tmp_path: Path) -> None:
    tiny = replace(edge_measure.PROBLEMS["digits"], rounds=1, epochs=1, seeds=(0,), target=0.01)
    smaller(edge_measure, PROBLEMS={"digits": tiny}, RESULTS=tmp_path)
    smaller(edge_page, PROBLEMS={"digits": tiny}, PAGE=copied(edge_page.PAGE, tmp_path))
    smaller.run(edge.main, "digits")
    found = edge_measure.lines()
    stored = [edge.entry_of(line) for line in found]
    assert set(stored) >= set(edge_measure.entries("digits"))  # who waits is timed on fleets of no table as well
    assert len(stored) == len(set(stored))
    assert all(line["virtual_seconds_to"] == line["virtual_seconds"] > 0 for line in found)
    smaller.run(edge.main, "digits")
    assert len(edge_measure.lines()) == len(found), "nothing is done twice"
    assert "| asynchronous FedOVA, FedAsync |" in edge_page.PAGE.read_text()


@pytest.mark.parametrize("method", ["FedAvg + spectral", "FedOVA"])
def test_a_stored_run_is_timed_as_if_it_were_trained_again(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds, joules and bytes of a real run on the clock, from its accuracies alone."""
    monkeypatch.setitem(edge_measure.PROBLEMS, "digits", replace(edge_measure.PROBLEMS["digits"], target=0.2))
    entry = edge_measure.Entry("digits", "LoRa, ten-fold", method, 1)
    real = edge_measure.run(entry, fedge.Engine("cpu"), rounds=4)
    curve = {"rounds": 4, "seed": 1, "accuracy": real[0]["accuracy"], "device": "cpu", "setting": {}}
    found = list(edge_timed._timed([replace(entry, fleet=line["fleet"]) for line in real], curve))
    for name in ("virtual_seconds", "joules", "virtual_seconds_to", "joules_to", "megabytes_to"):
        assert [line[name] for line in found] == pytest.approx([line[name] for line in real], rel=1e-12), name
    assert real[0]["megabytes_to"] > 0


def test_the_page_of_the_edge_says_what_was_stored() -> None:
    """If not: `python -m benchmarks.edge --page`."""
    text = edge_page.PAGE.read_text()
    for name, part in edge_page.parts().items():
        assert f"<!-- {name}: python -m benchmarks.edge -->\n{part}<!-- /{name} -->" in text
    assert "not run" not in edge_page.choices()
    assert "Fashion-MNIST, to 85 % test accuracy (not run: Fisher L-BFGS; FedBuff; asynchronous FedOVA):" in text


def test_what_the_command_trains_is_what_is_stored() -> None:
    """Settings of timed rows are those of the yardstick; of those that were trained here, those of the command."""
    told = [line for line in edge_measure.lines() if line.get("setting") is not None]
    trained = [line for line in told if line["device"] != "timed"]
    assert {line["method"] for line in trained} == {edge_measure.LATE[1], edge_measure.SPECTRAL_OVA[1]}
    assert {line["method"] for line in told if line not in trained} == set(edge_timed.YARDSTICK) - {"FedOVA"}
    for line in told:
        here = edge_measure.setting(edge_measure.built(edge.entry_of(line)))
        if line in trained:
            assert here == line["setting"]
            continue
        spectral = {"server_optimiser": "spectral"} if "spectral" in line["method"] else {}
        assert here == {"epochs": 5, "batch_size": 15, **spectral, **line["setting"]}
    known = [edge.entry_of(line) for line in edge_measure.lines()]
    assert list(edge_timed.lines(known)) == [], "every stored run of the yardstick passes the check"


@pytest.mark.parametrize(
    ("other", "stored", "here"),
    [
        ({"fedavg": {"lr": 0.1}}, "lr 0.07", "lr 0.1"),
        ({"fedavg": {"lr": 0.07, "clip": 1.0}}, "epochs 5, lr 0.07", "batch_size 15, clip 1.0, epochs 5, lr 0.07"),
        ({"batch_size": 10}, "batch_size 15, epochs 5, lr 0.07", "batch_size 10, epochs 5, lr 0.07"),
    ],
)
def test_a_stored_run_with_another_setting_is_refused(
    other: dict[str, Any], stored: str, here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [edge.entry_of(line) for line in edge_measure.lines()]
    monkeypatch.setitem(edge_measure.PROBLEMS, "kws", replace(edge_measure.PROBLEMS["kws"], **other))
    told = (
        f"kws, FedAvg, seed .: the stored run has .*{stored}, benchmarks/edge/measure.py has .*{here}: put the stored"
    )
    with pytest.raises(SystemExit, match=told):
        list(edge_timed.lines(known))


DEVICES = "flops,down,up,compute_watts,kind\n8e9,50e6,20e6,6,board\n2e9,5e6,2e6,3,old board\n"


def test_edge_on_own_devices(smaller: Smaller, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Published lines do not count as done, and nothing is published."""
    smaller(edge_measure, PROBLEMS={"digits": replace(edge_measure.PROBLEMS["digits"], seeds=(0,), target=0.01)})
    smaller(edge_page, PAGE=copied(edge_page.PAGE, tmp_path))
    (tmp_path / "devices.csv").write_text(DEVICES)
    before, page, out = edge_measure.lines(), edge_page.PAGE.read_text(), tmp_path / "out"
    words = ("digits", "--devices", str(tmp_path / "devices.csv"), "--out", str(out), "--rounds", "1")
    smaller.run(edge.main, *words)
    found = edge_measure.lines(out / "results.jsonl")
    assert [(line["fleet"], line["method"]) for line in found] == [("yours", m) for m in edge_measure.EVERYWHERE]
    table, printed = (out / "table.md").read_text(), capsys.readouterr().out
    assert table in printed
    first, *each = printed.splitlines()[: len(found) + 1]
    assert first == f"{len(found)} runs to do, 0 are in {out / 'results.jsonl'}"
    assert [line.split(" seed 0: ")[0] for line in each] == [
        f"{at} of {len(found)}: digits {method}" for at, method in enumerate(edge_measure.EVERYWHERE, 1)
    ]
    assert "the thriftiest is" in table
    assert "| method | yours: final accuracy, % | yours: MB | yours: s | yours: J |" in table
    assert all(f"| {method} |" in table for method in edge_measure.EVERYWHERE)
    assert "the fastest is" in table
    smaller.run(edge.main, *words)
    assert edge_measure.lines(out / "results.jsonl") == found, "nothing is done twice"
    smaller.run(edge.main, "--take", str(out))
    assert edge_measure.lines() == before
    assert edge_page.PAGE.read_text() == page


def test_energy_that_is_not_known_is_not_zero() -> None:
    """Devices without watts: as in the table of fedge run."""
    line = {"problem": "digits", "fleet": "yours", "seed": 0, "final": 0.9, "megabytes_to": 2.0, "joules_to": 0.0}
    lines = [
        {**line, "method": method, "virtual_seconds_to": 3.0 + at} for at, method in enumerate(("FedAvg", "FedOVA"))
    ]
    table = edge_page.on_fleets(["yours"], lines)
    assert "| FedAvg | 90.0 (1 of 3 seeds) | 2 | 3 | – |" in table
    assert table.endswith("- yours: the fastest is **FedAvg**.\n")


def test_own_devices_are_those_of_the_file(tmp_path: Path) -> None:
    """FedAvg waits for all, so the slowest of the cohort is the slower of two devices."""
    (tmp_path / "devices.csv").write_text(DEVICES)
    fleets = {"yours": fedge.edge.Table(str(tmp_path / "devices.csv"), edge_measure.CLIENTS)}
    (line,) = edge_measure.run(
        edge_measure.Entry("digits", "yours", "FedAvg", 0), fedge.Engine("cpu"), rounds=1, fleets=fleets
    )
    size = 4 * (64 * 32 + 32 + 32 * 10 + 10)
    radio = 8 * size / 5e6 + 8 * (size + 4) / 2e6
    assert radio < line["virtual_seconds"] < radio + 0.01


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--devices", "a.csv"), "needs a PROBLEM and --out DIR"),
        (("digits", "--devices", "a.csv"), "needs a PROBLEM and --out DIR"),
        (("digits", "--devices", "a.csv", "--out", "other"), "runs on other devices or of another number of rounds"),
        (("digits", "--devices", "none.csv", "--out", "new"), "--devices none.csv: cannot read the devices"),
        (("digist", "--devices", "a.csv", "--out", "new"), "unknown problem 'digist': there are digits"),
    ],
)
def test_own_devices_that_cannot_be_are_refused(
    words: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text(DEVICES)
    Path("other").mkdir()
    key = {"problem": "digits", "fleet": "yours", "method": "FedAvg", "seed": 0, "rounds": 50}
    Path("other/results.jsonl").write_text(json.dumps({**key, "devices": "of another file"}) + "\n")
    monkeypatch.setattr(sys, "argv", ["edge", *words])
    with pytest.raises(SystemExit, match=told):
        edge.main()
    assert edge_yours.digest(Path("a.csv")) != "of another file"


def test_edge_partial_work(smaller: Smaller, tmp_path: Path) -> None:
    stored = edge_measure.lines(edge_partial.FILE)
    wanted = {(m, s, seed) for m in edge_partial.METHODS for s in edge_partial.SETTINGS for seed in edge_partial.SEEDS}
    assert {(line["method"], line["setting"], line["seed"]) for line in stored} == wanted
    assert {line["rounds"] for line in stored} == {edge_partial.ROUNDS}
    smaller(edge_partial, FILE=tmp_path / "partial.jsonl", ROUNDS=1, SEEDS=(0, 1))
    smaller(edge_page, PAGE=copied(edge_page.PAGE, tmp_path))
    assert edge_partial.rows()[1][1:] == ["not run", "not run"]
    smaller.run(edge_partial.main)
    smaller.run(edge_partial.main)
    found = edge_measure.lines(edge_partial.FILE)
    assert len(found) == 2 * 3 * 2, "nothing is done twice"
    assert edge_page.parts()["partial"] in edge_page.PAGE.read_text()


def test_edge_pictures(smaller: Smaller, tmp_path: Path) -> None:
    """All are drawn from runs; those of the page have more rounds."""
    for name, module in vars(edge_picture).items():
        if name.startswith("picture_"):
            smaller(module, PICTURE=tmp_path / f"{name}.png")
    smaller(edge_picture, PICTURE=tmp_path / "policies.png", ROUNDS=1)
    smaller(edge_picture.picture_choices, ROUNDS=2)
    smaller(edge_picture.picture_asynchronous, ROUNDS=3)
    edge_picture.main()
    assert len({path.read_bytes()[:8] for path in tmp_path.iterdir()}) == 1
    assert {path.name for path in tmp_path.iterdir()} == {
        "policies.png", "picture_partial.png", "picture_choices.png", "picture_asynchronous.png"
    }  # fmt: skip
    panels = edge_picture.panels()
    assert any(not bar.counts for bar in panels["wait for all, stay = 0.3"][0]), "nobody left"
    answers = [bar for bar in panels["FedAsync"][0] if bar.begin + sum(bar.parts) < panels["FedAsync"][1][-1]]
    assert len(panels["FedAsync"][1]) == len(answers) + 1, "every answer is a step"


def test_edge_choice(smaller: Smaller, tmp_path: Path) -> None:
    tiny = replace(edge_measure.PROBLEMS["digits"], rounds=1, epochs=1, target=0.01)
    some = dict(list(edge_choice.SETTINGS.items())[9:12])
    smaller(edge_choice, PROBLEMS={"digits": tiny}, FILE=tmp_path / "choices.jsonl", SETTINGS=some, SEEDS=(10,))
    smaller(edge_page, PAGE=copied(edge_page.PAGE, tmp_path))
    smaller.run(edge_choice.main)
    smaller.run(edge_choice.main)
    found = edge_measure.lines(edge_choice.FILE)
    assert len(found) == 3 * 2, "of three settings on two fleets nothing is done twice"
    assert edge_page.choices() in edge_page.PAGE.read_text()


def test_the_rule_takes_the_fastest_of_those_that_end_near_the_best(smaller: Smaller, tmp_path: Path) -> None:
    ends = {"a": (0.900, 9.0), "e": (0.895, 5.0), "b": (0.896, 5.0), "c": (0.894, 1.0), "d": (0.899, None)}
    key = {"problem": "digits", "fleet": "LTE, ten-fold", "seed": 10}
    lines = [key | {"setting": name, "final": end, "virtual_seconds_to": s} for name, (end, s) in ends.items()]
    (tmp_path / "choices.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    smaller(edge_choice, FILE=tmp_path / "choices.jsonl", SETTINGS=dict.fromkeys(ends))
    assert edge_choice.chosen("digits", "LTE, ten-fold") == "b"
    assert edge_choice.chosen("digits", "LoRa, ten-fold") is None
    assert [row[:3] for row in edge_choice.rows("digits")[1:]] == [
        ["a", "90.0", "9"], ["e", "89.5", "5"], ["b", "**89.6**", "**5**"], ["c", "89.4", "1"], ["d", "89.9", "–"]
    ]  # fmt: skip


def test_graphs(smaller: Smaller, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One workload, into a copy of the figures."""
    smaller(graphs, FIGURES=tmp_path / "graphs.json", REPEATS=1)
    graphs.main(["U"])
    (figures,) = processors.stored(graphs.FIGURES).values()
    found = figures["timings"]["U"]
    ratio = found["plain"][0] / found["seconds"][0]
    assert f"{ratio:.2f} times faster ({ratio:.2f} to {ratio:.2f})" in capsys.readouterr().out


@pytest.mark.skipif(not there_is_a_compiler(), reason="no C compiler on this machine")
def test_layers(smaller: Smaller, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of each kind, into copies."""
    (tmp_path / "speed.md").write_text("<!-- layers: python -m benchmarks.layers -->\n<!-- /layers -->\n")
    sizes = {name: getattr(layers, name)[:1] for name in ("CONVOLUTIONS", "ATTENTION", "NORMS")}
    sizes |= {"LINEARS": layers.LINEARS[-1:], "REPEATS": 1, "SPAN": 0.001}
    smaller(layers, FIGURES=tmp_path / "layers.json", PAGE=tmp_path / "speed.md", **sizes)
    layers.main([])
    (figures,) = processors.stored(layers.FIGURES).values()
    conv, linear, attention, norm = figures["timings"]
    kinds = [one["kind"] for one in figures["timings"]]
    assert kinds == ["convolution", "linear", "attention", "layer norm"]
    assert conv["products"] == 2 * 10 * 28 * 28 * 16 * 25
    assert linear["products"] == 3 * 10 * 256 * 256
    assert attention["products"] == 6 * 5 * 10 * 4 * 20 * 20 * 8
    assert norm["products"] == 0
    ratio = conv["plain"][0] / conv["seconds"][0]
    assert f"| {ratio:.2f} ({ratio:.2f} to {ratio:.2f}) |" in (tmp_path / "speed.md").read_text()
    assert layers.table() in capsys.readouterr().out


def test_the_page_has_the_stored_layers() -> None:
    assert layers.table() in layers.PAGE.read_text()


@pytest.mark.parametrize("name", newcomers.MODELS)
def test_no_newcomer_s_model_is_refused(name: str) -> None:
    """Each trains in every way, batch norm by the remedies that its refusal names."""
    work = newcomers.workload(name, 10)
    for way in WAYS:
        algorithm, federation = work.build(False)
        link = Simulator(algorithm, federation, way=way)
        run = fedge.train(algorithm, federation, rounds=1, cohort=3, link=link)
        start = fedge.handle.parameters(algorithm.model)
        assert run.rounds == 1
        assert any(not torch.equal(run.params[leaf], start[leaf]) for leaf in start)


def test_newcomers(smaller: Smaller, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One model, and the verdict on both sides of the limit."""
    smaller(newcomers, FIGURES=tmp_path / "newcomers.json", REPEATS=1, SPAN=0.001, SLACK=0.0, RUNS=1, ROUNDS=2)
    assert newcomers.main(["embedding"]) == 0
    assert capsys.readouterr().out.endswith("slower than the loop: none\n")
    smaller(newcomers, SLACK=1e9)
    assert newcomers.main(["embedding"]) == 1
    assert capsys.readouterr().out.endswith("slower than the loop: embedding, 10; embedding, 60; embedding, run\n")
    (figures,) = processors.stored(newcomers.FIGURES).values()
    assert set(figures["timings"]) == {"embedding, 10", "embedding, 60", "embedding, run"}


def test_newcomers_were_not_slower_when_it_was_measured() -> None:
    """But for what is known to be, which has to be so still; one processor has measured all of them."""
    figures = processors.stored(newcomers.FIGURES)
    every = {newcomers.workload(name, each).name for name in newcomers.MODELS for each in newcomers.SIZES}
    assert every in [set(own["timings"]) for own in figures.values()]
    for processor, own in figures.items():
        slower = {name for name, one in own["timings"].items() if newcomers.ratio(one) < newcomers.SLACK}
        assert slower == newcomers.LOSES.get(processor, set()), processor


def test_the_command_for_a_gpu(tmp_path: Path, smaller: Smaller, capsys: pytest.CaptureFixture[str]) -> None:
    """A line that fits, one that is too long, and one that fails: each is named, and what was found is kept."""
    fits, long = gpu.Line("mine", "B", 1, plain=True), gpu.Line("long", "B", 1e9)
    wrong = gpu.Line("wrong", "B", 1)
    first = gpu.one

    def one(line: Any, *rest: Any) -> Any:
        if line is wrong:
            warnings.warn("a step runs slower", stacklevel=1)
            raise RuntimeError("no such kernel")
        return first(line, *rest)

    smaller(gpu, PLAN=(long, wrong, fits), one=one)
    gpu.main(["--out", str(tmp_path), "--device", "cpu", "--short"])
    said = capsys.readouterr().out
    assert "long: passed over" in said
    assert "wrong: FAILED, RuntimeError: no such kernel" in said
    assert {path.name for path in tmp_path.iterdir()} == {"mine.json", "wrong.failed.txt"}
    why = (tmp_path / "wrong.failed.txt").read_text()
    assert why.startswith("Traceback")
    assert "in one" in why
    assert why.endswith("RuntimeError: no such kernel\nwarned: UserWarning: a step runs slower\n")
    (timing,) = json.loads((tmp_path / "mine.json").read_text())["timings"]
    assert timing["workload"] == "B"
    assert {"steps", "uploads"} <= {share[0] for share in timing["split"]}


def test_the_peer_in_jax_gets_the_same_work(smaller: Smaller, tmp_path: Path) -> None:
    """Its arrays are those of the workload; the program itself needs JAX, which is not part of the set-up."""
    found = peers.given("B")
    algorithm, federation = WORKLOADS["B"].build(False)
    assert (found["epochs"], found["batch"], found["cohort"]) == (5, 10, 20)
    assert found["index"][7, : found["sizes"][7]].tolist() == federation.examples(7).tolist()
    x = torch.from_numpy(found["x"][:5])
    w1, b1, w2, b2 = (torch.from_numpy(found[name]) for name in ("w1", "b1", "w2", "b2"))
    mine = torch.relu(x @ w1 + b1) @ w2 + b2
    torch.testing.assert_close(mine, algorithm.model(federation.data.train_x[:5]))

    class Still:
        def __init__(self, *_: Any) -> None: ...
        def __call__(self, rounds: int) -> float:
            return 0.001

        def close(self) -> None: ...

    smaller(peers, Peer=Still, TURNS=2, FIGURES=tmp_path / "jax.json")
    smaller(peers, compare=lambda name, python: compare(name, python, turns=2, span=0.001))
    peers.main(["--jax", sys.executable, "B"])
    (timing,) = json.loads(peers.FIGURES.read_text())["timings"]
    assert timing["jax"] == [0.001] * 2
    assert all(seconds > 0 for seconds in timing["seconds"])


def test_speed(smaller: Smaller, tmp_path: Path) -> None:
    for path in speed_page.HERE.glob("*.*"):
        shutil.copy(path, tmp_path)
    readme_copy = tmp_path / "project.md"
    shutil.copy(readme.README, readme_copy)
    (tmp_path / "README.md").unlink()
    smaller(speed_page, HERE=tmp_path, README=readme_copy)
    sys.modules.pop(f"{speed.__name__}.__main__", None)
    importlib.import_module(f"{speed.__name__}.__main__")
    assert (tmp_path / "README.md").read_text() == speed_page.page()
    assert readme_copy.read_text() == readme.README.read_text()


def test_kill_and_resume(smaller: Smaller, capsys: pytest.CaptureFixture[str]) -> None:
    one_second = SimpleNamespace(Random=lambda seed: SimpleNamespace(uniform=lambda low, high: 1.0))
    few = ["--set", "train.rounds=3", "--set", "train.checkpoint_every=1", "--no-report", "--quiet"]
    smaller(kill_and_resume, SETTINGS=few, random=one_second)
    assert smaller.run(kill_and_resume.main, "1") == 0
    assert "equal, bit for bit" in capsys.readouterr().out


def test_kill_reproduce(smaller: Smaller, capsys: pytest.CaptureFixture[str]) -> None:
    early = SimpleNamespace(Random=lambda: SimpleNamespace(uniform=lambda low, high: 0.2))
    smaller(kill_reproduce, NAMES=("optimisers",), ROUNDS=1, random=early, files=paper.write)
    assert smaller.run(kill_reproduce.main, "1") == 0
    assert re.search(r"1 kills, [1-9] tables, [1-9] lines: the same", capsys.readouterr().out)


def test_million_clients(smaller: Smaller, capsys: pytest.CaptureFixture[str]) -> None:
    smaller(million_clients, CLIENTS=100, LARGE=50, COHORT=5)
    smaller.run(million_clients.main)
    assert "a round with the large client, 5 steps long" in capsys.readouterr().out


def test_loop(smaller: Smaller, capsys: pytest.CaptureFixture[str]) -> None:
    smaller(loop, CASES=(("B", 1, 1),))
    smaller.run(loop.main)
    assert "times as fast as the loop" in capsys.readouterr().out


def test_ranks(smaller: Smaller, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group of one; two real processes are in tests/test_ranks.py."""
    monkeypatch.setenv("RANK", "0")
    smaller.run(ranks.main, "B", "2")
    assert capsys.readouterr().out.count("times faster: median") == 2


def test_scaling() -> None:
    times = scaling.in_turns({size: scaling.rounds(20, size) for size in (2, 4)}, repeats=2)
    assert all(seconds > 0 for seconds in times.values())
    done = subprocess.run([sys.executable, "-c", scaling.START], capture_output=True, text=True, check=True)
    first, whole = map(float, done.stdout.split())
    assert 0 < first <= whole


@pytest.mark.parametrize("words", [(), ("--one-by-one",)])
def test_uneven(words: tuple[str, ...], smaller: Smaller, capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"4": np.full(4, 4), "2 to 5": np.array([2, 3, 4, 5])}
    smaller(uneven, COHORT=2, EXAMPLES=20, sizes=lambda rng: counts)
    smaller(folding, Stacked=folding.Stacked)  # put back at the end
    smaller(recorder, SHARE=recorder.SHARE)
    smaller.run(uneven.main, "--rounds", "6", *words)
    assert capsys.readouterr().out.count("s per round") == len(counts)


def test_the_table_of_speed_says_what_was_stored(smaller: Smaller, tmp_path: Path) -> None:
    """The page is that of the stored figures; one row by hand; a new file of a GPU takes the place of a gap."""
    assert speed_table.page() == speed_table.PAGE.read_text("utf-8"), "python -m benchmarks.speed.table"
    every = speed_table.rows()
    assert {row.workload for row in every} >= {*"ABCDEGRLTU", "TA", "R2", "L2", "T2", "U2", "TA2", "FA", "FE"}
    assert {row.peer.split()[0] for row in every if row.theirs} == {"plain", "JAX", "pfl-research"}
    (jax,) = [row for row in every if row.peer.startswith("JAX") and row.workload == "B"]
    (kept,) = [
        one for one in json.loads((speed_table.HERE / "jax.json").read_text())["timings"] if one["workload"] == "B"
    ]
    each = sorted(b / a for a, b in zip(kept["seconds"], kept["jax"], strict=True))
    texts = [speed_table.short(one) for one in (float(np.median(each)), each[0], each[-1])]
    assert jax.cells()[6] == f"{texts[0]} ({texts[1]} to {texts[2]})"
    shutil.copytree(speed_table.HERE, tmp_path / "speed")
    smaller(speed_table, HERE=tmp_path / "speed")
    path = tmp_path / "speed" / "h200" / "L_tf32.json"
    path.unlink(missing_ok=True)
    assert ("L", []) in [(row.workload, row.ours) for row in speed_table.on_a_gpu()]
    like = json.loads((path.parent / "T_tf32.json").read_text())
    like["timings"][0] |= {
        "workload": "L",
        "seconds": [0.5],
        "plain": [2.0],
        "split": [["a", 1, 375, True], ["b", 1, 125, False]],  # milliseconds
    }
    path.write_text(json.dumps(like))
    (row,) = [row for row in speed_table.on_a_gpu() if row.workload == "L"]
    assert (row.cells()[3:6], row.cells()[7]) == (["500", "plain loop", "2000"], "25%")
    like["timings"][0]["split"][0][2] = 3750  # with a recording in it: no share of a round
    path.write_text(json.dumps(like))
    (row,) = [row for row in speed_table.on_a_gpu() if row.workload == "L"]
    assert row.cells()[7] == ""
    turns = row._replace(ours=[1.0, 1.0, 4.0], theirs=[2.0, 2.5, 40.0])
    assert turns.cells()[6] == "2.5 (2.0 to 10)", "the median of the turns, not the ratio of medians"
