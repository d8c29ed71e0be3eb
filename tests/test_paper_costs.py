"""What the results page says of bytes and local work, and its table of claims, on runs whose numbers are known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.paper import answer, brief, page, runs, verdicts
from benchmarks.paper.costs import Costs, at_bytes, gradients, per_round
from benchmarks.paper.places import EXPERIMENTS, entries
from benchmarks.paper.sections import sections
from benchmarks.paper.tables import cells
from benchmarks.rounds import grid, store
from benchmarks.rounds.findings import F2, ONE, Findings
from fedge.sweep import Choices, Entry, Store

from .sweeps import fake, row

SEEDS = runs.SEEDS
WORST = {"FedAvg": 1.0, "FedOVA": 2.0}  # MB per round


def line(entry: Entry, curve: list[float], megabytes: float, before: float = 0.0) -> dict:
    """A run with this curve, of so many MB per round and so many before the first one."""
    moved = (megabytes * len(curve) + before) * 1e6
    told = {"up_bytes": moved / 2, "down_bytes": moved / 2, "setup_bytes": before * 1e6, "rounds": len(curve)}
    final = sum(curve[-20:]) / len(curve[-20:])
    return fake(entry, final, config=entry.config) | told | {"test_accuracy": curve}


def ramp(end: float, rounds: int, steps: int) -> list[float]:
    """From 0 to the end in so many rounds, and flat from then on."""
    return [end * min(1.0, (number + 1) / steps) for number in range(rounds)]


def test_the_accuracy_at_a_budget_is_that_of_the_rounds_it_pays_for() -> None:
    (entry, *_) = entries("noniid", "fmnist", [0])
    found = line(entry, [number / 100 for number in range(1, 41)], 2.0, before=10.0)
    assert per_round(found) == pytest.approx(2e6)
    assert at_bytes(found, 50e6) == pytest.approx(0.18), "20 rounds after the 10 MB; the mean of the last five"
    assert at_bytes(found, 1e12) == pytest.approx(0.38), "a run is not continued: its end"
    assert at_bytes(found, 11e6) is None, "pays for no round"


def test_gradients_are_counted_by_pass_example_and_binary_model() -> None:
    """By hand: 60,000 examples on 100 clients, 20 of them in a round: 12,000, five passes."""
    wanted = {
        ("noniid", "fmnist-l2", "FedAvg"): 60_000,
        ("noniid", "fmnist-l2", "FedOVA"): 120_000,
        ("noniid", "fmnist-l5", "FedOVA"): 300_000,
        ("noniid", "cifar10-l3", "FedOVA"): 150_000,
        ("sharing", "fmnist", "Data sharing 10 %"): 66_000,
        ("clients", "kws-k500", "FedOVA"): 40_000,
        ("optimisers", "fmnist", "FedAvg-Adam"): 60_000,
        ("optimisers", "fmnist", "FedDANE"): 72_000,
        ("optimisers", "fmnist", "Fisher L-BFGS"): 72_000,
        ("batch-epochs", "fmnist-epochs", "FedOVA, E = 1"): 24_000,
    }
    for (name, cell, label), number in wanted.items():
        (found,) = [
            entry for entry in entries(name, cell.split("-")[0], [0]) if (entry.cell, entry.label) == (cell, label)
        ]
        assert gradients(found.config) == pytest.approx(number), (name, cell, label)


@pytest.fixture
def measured(tmp_path: Path) -> tuple[runs.Runs, Store]:
    """Table III on two data sets: FedOVA ends higher on both; at FedAvg's bytes on KWS alone."""
    kept, choices = Store(tmp_path / "results.jsonl"), Choices([])
    for dataset, steps in (("fmnist", 180), ("kws", 60)):
        for entry in entries("noniid", dataset, SEEDS):
            ours = entry.label == "FedOVA"
            curve = ramp(0.9 if ours else 0.88, 200, steps if ours else 100)
            kept.add(line(entry, curve, WORST[entry.label]))
    return runs.shown(kept, choices), kept


def test_the_first_screen_tells_equal_rounds_from_equal_bytes(measured: tuple[runs.Runs, Store]) -> None:
    found = answer.pairs(*measured)
    assert list(found) == ["Fashion-MNIST", "KWS"]
    for data, pair in ((data, pair) for data, group in found.items() for pair in group):
        assert pair.ahead == pytest.approx(2.0)
        at = 0.9 * (98 / 180 if data == "Fashion-MNIST" else 1.0)  # 100 rounds; the mean of the last five
        assert pair.ahead_at_bytes == pytest.approx(100 * at - 88)
    short, _, rounds, same_bytes, *_ = answer.bullets(*measured)
    assert "in 6 of 6 cells" in rounds
    assert "in 6 of 6" in short
    assert "in 3 of 6" in short
    ahead, behind = same_bytes.split("behind")
    assert "KWS at l = 2, 3, 5 by 2.0, 2.0, 2.0" in ahead
    assert "Fashion-MNIST at l = 2, 3, 5 by 39.0, 39.0, 39.0" in behind
    table = answer.equal_bytes(*measured)
    cells = row(table, "KWS, l = 2")
    assert cells[1:4] == ["88.0 ± 0.0", "90.0 ± 0.0", "90.0 ± 0.0"]
    assert cells[4:6] == ["80 %", "91 / 108"], "91 rounds at 1 MB; 54 rounds at 2 MB"


def test_a_cost_needs_every_seed_at_the_target(tmp_path: Path) -> None:
    kept, wanted = Store(tmp_path / "x.jsonl"), entries("noniid", "fmnist", [0, 1])
    mine = [entry for entry in wanted if (entry.cell, entry.label) == ("fmnist-l2", "FedAvg")]
    for entry, end in zip(mine, (0.9, 0.8), strict=True):
        kept.add(line(entry, [0.1, end], 3.0, before=1.0))
    cell = cells(wanted, kept)["FedAvg"]["fmnist-l2"]
    costs = Costs(cell, cell)
    assert costs.bytes_to(79) == pytest.approx(7e6), "two rounds and what came before"
    assert costs.gradients_to(79) == pytest.approx(120_000)
    assert (costs.bytes_to(85), costs.gradients_to(85)) == (None, None)


def test_every_claim_has_one_row_for_each_data_set(measured: tuple[runs.Runs, Store]) -> None:
    every = runs.of_the_paper(measured[0])
    table = verdicts.table(every, measured[1])
    keys = [tuple(one.strip("| ").split(" | ")[:2]) for one in table.splitlines()[2:]]
    assert len({*keys}) == len(keys)
    above = row(table, "FedOVA above FedAvg, points (l = 2, 3, 5)", "KWS")
    assert above[2:5] == ["+4.1 / +4.0 / +3.2", "+2.0 / +2.0 / +2.0", "**holds**"]
    stated = row(table, "FedOVA at least as accurate as stated (l = 2, 3, 5)", "Fashion-MNIST")
    assert stated[2:5] == ["89.4 / 90.3 / 91.7", "90.0 / 90.0 / 90.0", "**1 of 3 hold**"]
    assert not [data for _, data in keys if data == "CIFAR-10"], "nothing was run there"


def test_every_claim_leads_to_its_table() -> None:
    text = page.text()
    headings = {verdicts.anchor(heading) for heading in re.findall(r"^## (.*)$", text, re.MULTILINE)}
    links = re.findall(r"\]\(#([^)]*)\)", text)
    assert links
    assert {*links} <= headings


def test_the_page_is_short_and_has_one_table_and_one_figure_for_each_experiment() -> None:
    text = page.text()
    assert len(text.splitlines()) < 250
    for part in text.split("\n## ")[2:-1]:
        assert (part.count("\n| --- "), part.count("![")) == (1, 1), part.splitlines()[0]


def test_a_cell_without_results_is_said_in_one_line_only(measured: tuple[runs.Runs, Store]) -> None:
    told = runs.gaps(*measured)
    assert "all of CIFAR-10" in told
    assert "optimisers" in told
    assert "noniid" not in told
    found = sections(*measured, EXPERIMENTS)
    assert "CIFAR-10" not in found
    assert "Table II:" not in found, "no empty table"
    assert "Table III:" in found


def _part(readme: str) -> str:
    return readme.split("<!-- paper")[1].split("/paper -->")[0]


def test_the_readme_has_the_page_s_own_numbers() -> None:
    """In fewer words: whatever has a decimal is one of the page's."""
    words = [*re.findall(r"^- \*\*.*?(?=^- |^\n|^<!)", _part(page.readme()), re.MULTILINE | re.DOTALL)]
    assert len(words) == 7
    numbers = set(re.findall(r"\d+\.\d+", " ".join(words)))
    assert len(numbers) > 12
    assert numbers <= set(re.findall(r"\d+\.\d+", page.text()))


def test_the_answer_in_short(measured: tuple[runs.Runs, Store]) -> None:
    said = " ".join(brief.text(*measured).split())
    assert "FedOVA is ahead of a tuned FedAvg by these points: 2.0 on Fashion-MNIST, 2.0 on KWS." in said
    assert "is ahead in 3 of 6 cells, by 2.0 points and behind in 3 of 6 cells, by 39.0 points." in said


def test_what_the_page_says_of_the_spectral_step_is_what_was_measured() -> None:
    """`about a quarter of FedAvg's bytes`, from the results of benchmarks/rounds."""
    found = Findings(grid.read(), store.Store(store.RESULTS, store.RESULTS))
    ratio = found.at(F2, ONE, "test 0.88", "bytes") / found.at(F2, "FedAvg", "test 0.88", "bytes")
    assert "about a quarter" in answer.BETTER
    assert 0.2 <= ratio <= 0.3
