"""docs/curvature.md says what is stored, its sentences hold, and `python -m benchmarks.curvature` works in short."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import benchmarks.curvature.__main__ as command
from benchmarks.curvature import measure, page
from benchmarks.curvature.methods import METHODS

Line = dict[str, Any]
STORED = page.stored()


def test_the_page_says_what_was_stored() -> None:
    """If not: `python -m benchmarks.curvature --page`."""
    text = page.PAGE.read_text("utf-8")
    assert page.filled(text) == text


def raw(problem: str) -> list[Line]:
    """As stored, read without the benchmark's own code."""
    path = page.RESULTS / f"{problem.replace(' ', '-')}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def cells(problem: str, place: int) -> list[list[str]]:
    """The rows of a problem's table in the `place`-th block that has one per problem."""
    parts = page.PAGE.read_text("utf-8").split(f"\n### {page.TITLES[problem]}\n")
    lines = [line for line in re.split(r"\n###|<!--", parts[place])[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


@pytest.mark.parametrize("problem", page.TITLES)
def test_rounds_and_bytes_come_from_the_curves(problem: str) -> None:
    rows = cells(problem, 1)
    assert [row[0] for row in rows] == [method.name for method in METHODS]
    for row in rows:
        runs = [line for line in raw(problem) if line["kind"] == "run" and line["method"] == row[0]]
        assert [run["seed"] for run in runs] == [0, 1, 2]
        for place, target in enumerate((0.85, 0.9, 0.95)):
            at = [next((i for i, a in enumerate(run["accuracy"], 1) if a >= target), 99) for run in runs]
            shown = row[1 + place].split("**")[1]
            assert shown == ("-" if median(at) == 99 else str(median(at)))
            moved = median(sum(run["bytes"][:t]) if t < 99 else 1e99 for t, run in zip(at, runs, strict=True))
            assert row[4 + place] == ("-" if moved == 1e99 else f"{moved / 1e6:.1f}")


@pytest.mark.parametrize("problem", page.TITLES)
def test_every_method_had_the_same_budget_and_the_held_out_trials_chose(problem: str) -> None:
    for method in METHODS:
        lines = [line for line in raw(problem)[1:] if line["method"] == method.name]
        trials = [line for line in lines if line["kind"] == "trial"]
        assert len(trials) == 8
        assert [trial["setting"] for trial in trials] == list(method.grid)
        goal = measure.HELD_OUT[problem]

        def order(trial: Line, goal: float = goal) -> tuple[bool, float, float]:
            at = next((i for i, a in enumerate(trial["accuracy"], 1) if a >= goal), 99)
            return trial["diverged"], at, 0.0 if trial["diverged"] else -sum(trial["accuracy"][-5:])

        best = min(trials, key=order)["setting"]
        assert all(line["setting"] == best for line in lines if line["kind"] == "run")


def cost(problem: str, method: str, target: float = 0.95) -> tuple[float, float]:
    """Median rounds and MB to a target, infinite if it is not reached."""
    runs = [line for line in raw(problem) if line["kind"] == "run" and line["method"] == method]
    at = [next((i for i, a in enumerate(run["accuracy"], 1) if a >= target), 10**6) for run in runs]
    moved = [sum(run["bytes"][:t]) if t < 10**6 else 1e18 for t, run in zip(at, runs, strict=True)]
    return median(at), median(moved) / 1e6


CONTROLS = ("FedAvg", "FedAvg, server step", "FedAvg, server momentum")
CHEAP = ("FOOF", "FOOF, server step")  # a round has FedAvg's bytes


def test_the_sentences_of_the_page_hold() -> None:
    turned = [method.name for method in METHODS if "pectral" in method.name]
    names = [method.name for method in METHODS if method.name not in (*CONTROLS, *CHEAP, *turned)]
    assert cost("IID", "GIANT")[0] <= cost("IID", "FedAvg")[0] / 4
    for problem in page.TITLES:
        assert cost(problem, "GIANT")[0] < 2 / 3 * min(cost(problem, name)[0] for name in CONTROLS)
        cheapest = min(cost(problem, name)[1] for name in CONTROLS)
        assert all(cost(problem, name)[1] > cheapest for name in names)
        assert cost(problem, "GIANT")[1] < cost(problem, "FedAvg")[1]
        for target in (0.85, 0.9):
            slow = cost(problem, "Diagonal preconditioning", target)[0]
            assert slow > cost(problem, "Fisher L-BFGS, as printed", target)[0]
        assert cost(problem, "Fisher L-BFGS, chosen damping")[1] > 3 * cheapest
    plain, printed = (
        [line["accuracy"] for line in raw("IID") if line["kind"] == "run" and line["method"] == name]
        for name in ("FedAvg", "Fisher L-BFGS, as printed")
    )
    assert (
        max(abs(a - b) for one, two in zip(plain, printed, strict=True) for a, b in zip(one, two, strict=True)) < 0.03
    )
    assert page.inert(
        [line for line in raw("IID") if line["kind"] == "run" and line["method"] == command.METHODS[3].name]
    )


def final(problem: str, method: str) -> float:
    runs = [line["accuracy"][-5:] for line in raw(problem) if line["kind"] == "run" and line["method"] == method]
    return 100 * sum(map(sum, runs)) / 15


def test_what_is_said_of_spectral_steps_and_foof_holds() -> None:
    step, names = "Spectral server step", [method.name for method in METHODS]
    without = [name for name in names if "spectral server step" not in name.lower()]
    for problem, wanted in (("IID", 13), ("two labels", 15)):
        assert cost(problem, step)[0] == wanted
        assert all(cost(problem, step)[1] < cost(problem, name)[1] for name in without)
        assert cost(problem, "SCAFFOLD, spectral server step")[0] == wanted - 2
        best = min(cost(problem, name)[0] for name in CONTROLS)
        for name in ("Spectral carried", "SCAFFOLD, spectral server step"):
            assert cost(problem, name)[0] < 2 / 3 * best
    assert final("two labels", step) > max(final("two labels", name) for name in without if name != "Spectral carried")
    assert all(final("two labels", step) > final("two labels", name) - 0.05 for name in names)
    assert [cost("IID", name, 0.9) for name in ("FOOF", "FedAvg", "GIANT")] == [
        (4, pytest.approx(1.5, abs=0.05)),
        (8, pytest.approx(3.1, abs=0.05)),
        (4, pytest.approx(3.9, abs=0.05)),
    ]
    for target in (0.85, 0.9):
        assert cost("IID", "FOOF", target)[1] == min(cost("IID", name, target)[1] for name in names)
    for place in (0, 1):
        assert cost("IID", "FOOF")[place] < cost("IID", "FedAvg")[place] / 2
    for name in ("Spectral", "Spectral, spectral server step"):
        assert final("two labels", name) < 85


def test_inert_is_said_of_multiples_of_the_identity_alone() -> None:
    def line(cosine: float, high: float, step: float = 1.0) -> Line:
        return {"watched": {"cos_sy": [0.9, cosine, 1.0], "cos_step": [step] * 3, "length_sy": [1.0, 1.0, high]}}

    assert page.inert([line(0.995, 1.05)] * 3)
    assert page.inert([line(0.995, 1.05), line(0.995, 1.05), line(0.98, 1.05)])  # the median of the seeds
    assert not page.inert([line(0.98, 1.05)])
    assert not page.inert([line(0.999, 1.5)])
    assert not page.inert([line(0.999, 1.05, step=0.9)])


def test_benchmarks_curvature_in_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command benchmarks.curvature: one method of each kind, two rounds."""
    monkeypatch.setattr(measure, "ROUNDS", 2)
    monkeypatch.setattr(measure, "TUNING_ROUNDS", 1)
    monkeypatch.setattr(measure, "COHORT", 3)
    chosen = tuple(method for method in METHODS if method.name in ("Fisher L-BFGS, as printed", "Subspace Newton"))
    command.measure("IID", chosen, tmp_path)
    lines = page.load(tmp_path / "IID.jsonl")
    assert [line["kind"] for line in lines] == ["config"] + 2 * (["trial"] * 8 + ["run"] * 3)
    assert lines[9]["watched"]["cos_sy"][1] <= 1
    assert lines[-1]["watched"].keys() >= {"step_update", "candidate"}
    command.measure("IID", chosen, tmp_path)
    assert page.load(tmp_path / "IID.jsonl") == lines, "nothing is done twice"
    text = page.filled(page.PAGE.read_text("utf-8"), {"IID": lines})
    assert "| Subspace Newton | **-** (-, -, -) |" in text
    with pytest.raises(SystemExit, match="unknown problem 'iid': choose from IID, two labels"):
        command.main(["iid"])
