"""docs/second-order.md and the README say what is stored, and `fedge run` uses the settings that were chosen."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from statistics import mean, median, stdev
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import fedge
from benchmarks.readme import README
from benchmarks.rounds import aims, grid, page, store, tables
from benchmarks.rounds.findings import ARITHMETIC, Findings
from fedge.algorithms import FOOF
from fedge.edge import Clock, Profiles

ROOT = Path(__file__).parent.parent
Line = dict[str, Any]


def test_pages_are_what_the_results_make() -> None:
    for path in page.blocks():
        text = path.read_text("utf-8")
        assert page.filled(path, text) == text, f"run {page.COMMAND}"
    assert len(page.PAGE.read_text("utf-8").splitlines()) < 250, "tables stand on a page of their own"
    assert page.readme() == README.read_text("utf-8"), f"run {page.COMMAND}"
    assert page.FIGURE.is_file()


GRIDS = [tomllib.loads(path.read_text()) for path in (grid.GRID, page.DIGITS_GRID)]
PROBLEMS = {name: one for grid_ in GRIDS for name, one in grid_["problem"].items()}


def stored(problem: str, kind: str) -> list[Line]:
    """Lines as they are stored, read without the benchmark's own code."""
    path = (page.DIGITS if problem == "digits" else store.RESULTS) / f"{problem}.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["kind"] == kind]


def winner(problem: str, method: str) -> Any:
    """The setting that wins the longest held-out trials: fewest rounds to the target, then the highest end.

    For a problem like another one: the highest end there.
    """
    like = PROBLEMS[problem].get("like")
    target = PROBLEMS[like or problem]["held_out"]
    trials = [line for line in stored(like or problem, "trial") if line["method"] == method]
    longest = [line for line in trials if line["rounds"] == max(line["rounds"] for line in trials)]
    settings = {str(line["setting"]): line["setting"] for line in longest}

    def place(name: str) -> tuple[Any, ...]:
        curves = [line["accuracy"] for line in longest if str(line["setting"]) == name]
        fell = any(line["diverged"] for line in longest if str(line["setting"]) == name)
        at = median(next((i for i, one in enumerate(curve) if one >= target), 10**6) for curve in curves)
        end = -mean(mean(curve[-3:]) for curve in curves)
        return (fell, end) if like else (fell, at, end)

    return settings[min(settings, key=place)]


def raw(problem: str) -> list[Line]:
    """The runs of a problem with the settings that win."""
    found = [line for line in stored(problem, "run") if line["setting"] == winner(problem, line["method"])]
    return sorted(found, key=lambda line: line["seed"])


def shown(problem: str) -> list[list[list[str]]]:
    """The cells of the tables under a problem's heading: a list of tables, each a list of rows."""
    text = page.TABLES.read_text("utf-8").split(f"\n### {page.TITLES[problem]}\n")[1]
    text = re.split(r"\n##|\nNot run yet", text)[0]
    found = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    return [[[cell.strip() for cell in line.strip("|").split(" | ")] for line in one] for one in found]


def rounds_in(line: Line, goal: str) -> int | None:
    which, value, _ = goal.split()
    curve = line["accuracy" if which == "test" else "train_accuracy"]
    return next((at for at, one in enumerate(curve, 1) if one >= float(value) / 100), None)


@pytest.mark.parametrize("problem", [name for name in page.TITLES if stored(name, "run")])
def test_rounds_bytes_and_accuracies_of_the_tables_come_from_the_curves(problem: str) -> None:
    runs = raw(problem)
    rounds, costs, *_ = shown(problem)
    last = 5 if problem == "digits" else 10
    goals = [head.removeprefix("rounds to ") for head in rounds[0] if head.startswith("rounds to ")]
    assert len(rounds) - 2 == len({line["method"] for line in runs})
    for row, money in zip(rounds[2:], costs[2:], strict=True):
        lines = [line for line in runs if line["method"] == row[0].split(" (")[0]]
        for place, goal in enumerate(goals, 1):
            found = [rounds_in(line, goal) for line in lines]
            middle = median(float("inf") if one is None else one for one in found)
            seeds = ", ".join("-" if one is None else str(one) for one in found)
            assert row[place] == f"**{'-' if middle == float('inf') else f'{middle:g}'}** ({seeds})"
            if middle == float("inf"):
                assert money[place] == "-"
                continue
            whole = median((line["spent"]["up"] + line["spent"]["down"]) / len(line["accuracy"]) for line in lines)
            said = float(money[place].split(";")[0].replace(",", ""))
            assert said == pytest.approx(middle * whole / 1e6, rel=0.03)
        final = mean(100 * mean(line["accuracy"][-last:]) for line in lines)
        assert float(row[len(goals) + 1].split()[0]) == pytest.approx(final, abs=0.006)
        ends = [100 * line["final_late"] for line in lines if line["final_late"] is not None]
        assert float(row[len(goals) + 2].split()[0]) == pytest.approx(mean(ends), abs=0.006)
        assert ("seeds)" in row[len(goals) + 2]) == (len(ends) < len(lines)), "a run that broke off has no late rounds"
        assert row[-2:] == [str(sum(line[name] for line in lines)) for name in ("dropped", "diverged")]


def test_the_default_experiment_has_the_settings_that_were_chosen() -> None:
    """And the model, clients and rounds of the problem they were chosen on."""
    default = tomllib.loads((ROOT / "fedge" / "default.toml").read_text())
    known, runs = page.digits().grid, page.digits().runs("digits")
    problem = known.problems["digits"]
    assert default["partition"]["labels"] == problem.labels
    assert (default["train"]["rounds"], default["train"]["cohort"]) == (problem.rounds, problem.cohort)
    assert [table["label"] for table in default["algorithm"]] == list(page.LABELS)
    for table in default["algorithm"]:
        method = known.methods[page.LABELS[table["label"]]]
        inner = table["inner"] if method.around else table
        chosen = runs[method.name][0]["setting"]
        have = {name: value for name, value in inner.items() if name not in ("name", "label")}
        assert have == {**known.common, **method.fixed, **chosen}


def test_every_choice_was_made_by_the_held_out_trials() -> None:
    for found in (page.published(), page.digits()):
        for problem in found.grid.problems:
            for name, lines in found.runs(problem).items():
                assert all(line["setting"] == winner(problem, name) for line in lines), (problem, name)
                seeds = [line["seed"] for line in lines]
                assert len(seeds) == len(set(seeds)), "one run per seed"


def test_seconds_come_from_runs_made_alone() -> None:
    for name, lines in page.published().runs("fmnist-iid").items():
        beside = any("jobs" in line for line in lines)
        assert tables.cost(lines, "test 0.88").endswith("; -") == beside, name


def test_values_at_the_edge_of_the_grid_have_a_star() -> None:
    method = grid.Method("m", "fedavg", [{"lr": 0.1}, {"lr": 0.2, "lr_decay": 0.9}, {"lr": 0.3, "lr_decay": 0.9}])
    assert tables.setting({"lr": 0.2, "lr_decay": 0.9}, method) == "lr 0.2, lr_decay 0.9"
    assert tables.setting({"lr": 0.3}, method) == "lr 0.3\\*"
    assert tables.setting({"lr": 0.3}) == "lr 0.3"


def line(seed: int, rounds: int | None, final: float = 0.5) -> Line:
    there = None if rounds is None else {"rounds": rounds, "up": 10**6, "down": 10**6, "gradients": 1, "seconds": 1.0}
    return {"seed": seed, "to": {"test 0.9": there}, "final": final}


def test_a_seed_that_never_gets_there_counts_as_the_worst() -> None:
    some, other = [line(0, 4), line(1, None), line(2, 6)], [line(0, 10), line(1, 11), line(2, 13)]
    assert tables.each(some, "test 0.9") == "**6** (4, -, 6)"
    assert tables.difference(some, other, "test 0.9") == "-6.5 ± 0.7 (2 of 3 pairs)"
    assert tables.each([line(0, 4), line(1, None)], "test 0.9") == "**-** (4, -)"
    assert tables.cost([line(0, None)], "test 0.9") == "-"
    assert aims.met(8, 8, low=True) == "met"
    assert aims.met(91.9, 92, low=False) == "missed"


def test_rows_without_runs_are_one_line(tmp_path: Path) -> None:
    told = page.text(Findings(grid.read(), store.Store(tmp_path, tmp_path)))
    assert told.startswith("Not run yet: ")
    assert told.count("\n") == 0


def on_a_phone(algorithm: fedge.FedAvg, examples: int) -> tuple[float, float]:
    """Seconds of work, and of all else, in a round of one client."""
    x, y = torch.rand(examples, 1, 28, 28), torch.arange(examples) % 10
    federation = fedge.Federation(fedge.data.Data(x, y, x, y, 10), [range(examples)])
    link = Clock(fedge.Engine("cpu").link(algorithm, federation), federation, Profiles("phone"))
    run = fedge.train(algorithm, federation, rounds=1, seed=0, link=link)
    _, latency, down, work, up, _ = run.history[0]["timeline"][0]["clients"][0]
    return work, latency + down + up


def test_what_local_spectral_steps_cost_on_phones() -> None:
    """Counted on the clock with a client of two steps; all else of a round follows from it."""
    seconds = {}
    for name, setting in {"plain": {}, "spectral": {"optimiser": "spectral", "carry_momentum": True}}.items():
        model = fedge.models.fmnist_cnn(seed=0)
        work, rest = on_a_phone(fedge.FedAvg(model, epochs=1, batch_size=15, **setting), 30)
        seconds[name] = (work, rest + 100 * work)  # of two steps; of a round of two hundred
    assert round(seconds["spectral"][0] / seconds["plain"][0]) == ARITHMETIC
    text = " ".join(page.PAGE.read_text().split())
    plain, spectral = seconds["plain"][1], seconds["spectral"][1]
    assert f"takes {plain:.0f} s with FedAvg and {spectral:.0f} s with *Spectral carried*" in text
    assert f"31 rounds take {round(31 * plain, -1):.0f} s and 8 rounds {round(8 * spectral, -1):,.0f} s" in text
    assert f"server step's 13 take {round(13 * plain, -1):.0f} s" in text
    assert f"{ARITHMETIC} times the arithmetic per round" in text


def test_what_foof_costs_on_phones() -> None:
    """A whole round of the yardstick's client, since its inverses are made once per round."""
    kinds, common = (fedge.FedAvg, FOOF), {"epochs": 5, "batch_size": 15}
    plain, foof = (on_a_phone(kind(fedge.models.fmnist_cnn(seed=0), **common), 600)[0] for kind in kinds)
    assert f"| FedAvg's bytes, {foof / plain:.1f} times its arithmetic" in page.PAGE.read_text()


def test_seeds_that_diverge_count_for_those_who_are_asked() -> None:
    def falls(*seeds: bool) -> list[Line]:
        return [{"diverged": fell} for fell in seeds]

    one, two = {"A": falls(True, False), "B": falls(False)}, {"A": falls(True), "B": falls(True, True)}
    found = SimpleNamespace(grid=SimpleNamespace(problems=["one", "two"]), runs={"one": one, "two": two}.__getitem__)
    assert aims.fallen(cast("Findings", found), lambda problem, name: name == "A") == 2
    assert aims.fallen(cast("Findings", found), lambda problem, name: (problem, name) == ("two", "B")) == 2


SPECTRAL = ("pectral", "SOAP", "Shampoo", "FOOF", "GIANT", "DONE", "Newton", "L-BFGS")


def reached(curves: list[list[float]], goal: float) -> float:
    """The median of the first rounds at a goal."""
    return median(next((at for at, one in enumerate(curve, 1) if one >= goal), float("inf")) for curve in curves)


def spent(problem: str, goals: list[tuple[str, float]]) -> dict[str, list[float]]:
    """By method: the median MB to each goal."""
    found = {}
    for method in {line["method"] for line in raw(problem)}:
        lines = [line for line in raw(problem) if line["method"] == method]
        names = {"accuracy": "test", "train_accuracy": "train"}
        there = [[line["to"][f"{names[which]} {goal:g}"] for line in lines] for which, goal in goals]
        found[method] = [
            median(one["up"] + one["down"] if one else float("inf") for one in ones) / 1e6 for ones in there
        ]
    return found


def shares(problem: str, method: str) -> str:
    """The smallest and the largest share of the cheapest first-order method's MB, over all targets."""
    goals = [("accuracy", goal) for goal in PROBLEMS[problem]["test"]]
    goals += [("train_accuracy", goal) for goal in PROBLEMS[problem]["train"]]
    moved = spent(problem, goals)
    first = [values for name, values in moved.items() if not any(word in name for word in SPECTRAL)]
    found = [mine / min(rest) for mine, *rest in zip(moved[method], *first, strict=True)]
    return f"{min(found):.2f} to {max(found):.2f}"


def words() -> str:
    return " ".join(page.PAGE.read_text("utf-8").split())


def test_byte_shares_of_the_recommendations_are_all_that_are_stored() -> None:
    said = words()
    both, server, shrinking = (
        [shares(problem, method) for problem in ("fmnist-iid", "kws-iid")]
        for method in ("Spectral + server spectral", "Server spectral", "Server spectral, schedule")
    )
    assert f"{both[0]} of the cheapest first-order method's MB to the targets on Fashion-MNIST (KWS {both[1]})" in said
    assert f"{both[0]} of the MB" in " ".join((ROOT / "CHANGELOG.md").read_text("utf-8").split())
    assert f"{server[0]} of those MB (KWS {server[1]})" in said
    assert f"with `server_lr_decay` {shrinking[0]} ({shrinking[1]})" in said
    ranges = []
    for problem in ("fmnist-l2", "kws-l2"):
        moved = spent(problem, [("accuracy", goal) for goal in PROBLEMS[problem]["test"]])
        pairs = zip(moved["FedAvg + server spectral"], moved["FedOVA + server spectral"], strict=True)
        found = [one / two for one, two in pairs]
        ranges.append(f"{min(found):.2f} to {max(found):.2f} of the bytes")
    assert all(one in said for one in ranges)


def test_settings_of_the_recommendations_are_those_that_were_chosen() -> None:
    rows = [line for line in page.PAGE.read_text("utf-8").split("## What was measured")[0].splitlines() if "|" in line]
    cases = {
        "rounds are expensive": "Spectral carried",
        "bytes are expensive": "Spectral + server spectral",
        "device time": "Server spectral",
        "final accuracy counts": "FOOF",
        "hold few labels each |": "FedAvg + server spectral",
        "steady accuracy": "FedOVA + server spectral",
        "about half": "FedOVA + server spectral",
    }
    for words_, method in cases.items():
        cell = next(row for row in rows if words_ in row).split("|")[3]
        problems = ("fmnist-l2", "kws-l2") if method.startswith("Fed") else ("fmnist-iid", "kws-iid")
        problems = ("fmnist-l5", "kws-l5") if words_ == "about half" else problems
        ours, kws = (winner(problem, method) for problem in problems)
        for name in ours | kws:
            a, b = (f"{one.get(name, float(name == 'lr_decay')):g}" for one in (ours, kws))
            assert f"`{name}` {a}" + (f" ({b})" if a != b else "") in cell, (method, name)


def test_what_holds_against_the_numbers_is_what_is_stored() -> None:
    said = words()
    ends = {}
    for problem in ("kws-iid", "fmnist-iid"):
        finals = [100 * mean(line["accuracy"][-10:]) for line in raw(problem) if line["method"] == "FOOF"]
        ends[problem] = f"{mean(finals):.2f} ± {stdev(finals):.2f}"
    assert f"{ends['kws-iid']} % on KWS" in said
    assert f"{ends['fmnist-iid']} on Fashion-MNIST" in said

    def fell(problem: str, method: str, **wanted: float) -> tuple[int, int]:
        trials = [line for line in stored(problem, "trial") if line["method"] == method]
        trials = [line for line in trials if wanted.items() <= line["setting"].items()]
        return len({str(line["setting"]) for line in trials if line["diverged"]}), len(
            {str(line["setting"]) for line in trials}
        )

    shrinking, steep = "FedOVA + server spectral, schedule", {"server_momentum": 0.3, "server_lr": 6.0}
    assert [fell(problem, shrinking) for problem in ("fmnist-l2", "kws-l2")] == [(9, 10)] * 2
    assert [fell(problem, shrinking, **steep) for problem in ("fmnist-l2", "kws-l2")] == [(6, 7), (7, 7)]
    assert (
        "nine of ten settings diverged on both data sets (with `server_momentum` 0.3 and `server_lr` 6 six of seven"
        in said
    )
    assert [fell(problem, "DONE") for problem in ("fmnist-iid", "kws-iid")] == [(10, 10)] * 2
    assert "DONE diverged with all ten settings on both" in said
    low = {
        method: sum(
            line["rounds"] == 12 and line["accuracy"][-1] < 0.13
            for line in stored("kws-l2", "trial")
            if line["method"] == method
        )
        for method in ("FedAvg", "FedAvgM", "Long-step FedAvg")
    }
    assert list(low.values()) == [4, 6, 7]
    assert "four of FedAvg's ten settings, six of FedAvgM's and seven of *Long-step FedAvg*'s" in said


def test_clipped_rivals_are_those_of_the_results() -> None:
    said, path = words(), ROOT / "benchmarks" / "paper" / "results" / "results.jsonl"
    for problem, label, who in (("fmnist-l2", "Clipped FedAvg", "FedAvg"), ("kws-l2", "Clipped FedOVA", "FedOVA")):
        lines = [line for text in path.read_text().splitlines() if (line := json.loads(text))["cell"] == problem]
        lines = sorted((line for line in lines if line["label"] == label), key=lambda line: line["seed"])
        curves = [line["test_accuracy"] for line in lines]
        at = [reached([curve], 0.88) for curve in curves]
        assert "(" + ", ".join(f"{one:g}" for one in at) in said
        assert f"{who} with them needs {median(at):g}" in said or f"{who} {median(at):g} on KWS" in said
        moved = median((line["up_bytes"] + line["down_bytes"]) / line["rounds"] for line in lines) / 1e6
        goals = [0.88, 0.9][: 1 if problem == "fmnist-l2" else 2]
        mine = spent(problem, [("accuracy", goal) for goal in goals])
        for name in ("FedAvg + server spectral", "FedOVA + server spectral")[: len(goals)]:
            for goal, used in zip(goals, mine[name], strict=True):
                assert f"{used / moved / reached(curves, goal):.2f}" in said


def test_what_of_a_server_step_is_its_length() -> None:
    """The rounds that long plain steps save, of those that spectral steps save."""
    said, saved = words(), {}
    for problem in ("fmnist-iid", "kws-iid", "fmnist-l2", "kws-l2"):
        names = ("FedAvg-SGD", "Long-step FedAvg", "Server spectral")
        names = names if problem.endswith("iid") else ("FedAvg", names[1], "FedAvg + server spectral")
        goals = [("accuracy", goal) for goal in PROBLEMS[problem]["test"]]
        goals += [("train_accuracy", goal) for goal in PROBLEMS[problem].get("train", [])]
        for which, goal in goals:
            plain, long, spectral = (
                reached([line[which] for line in raw(problem) if line["method"] == name], goal) for name in names
            )
            if float("inf") not in (plain, long):
                saved[problem, which, goal] = round(100 * (plain - long) / (plain - spectral))
    mine = [value for (problem, *_), value in saved.items() if problem == "fmnist-iid"]
    assert f"{min(mine)} to {max(mine)} % of the rounds" in said
    kws = [saved["kws-iid", "train_accuracy", goal] for goal in (0.95, 0.975)]
    assert f"on KWS {kws[0]} and {kws[1]} % to the train targets" in said
    assert (
        f"save {saved['kws-iid', 'accuracy', 0.88]} and {saved['kws-iid', 'accuracy', 0.89]} % to 88 and 89 %" in said
    )
    two = [saved["fmnist-l2", "accuracy", goal] for goal in (0.85, 0.88)]
    assert f"({two[0]} and {two[1]} % to 85 and 88 %)" in said
    assert f"length saves {saved['kws-l2', 'accuracy', 0.85]} % to 85 %" in said
