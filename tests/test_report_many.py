"""Reports of many runs: means and bands over seeds, short labels, filters, and losses that cannot be compared."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fedge.report import grouped, read_all, write_report
from fedge.report.curves import accuracy, loss
from fedge.report.filters import Filters
from fedge.report.groups import band, spread
from fedge.report.heatmap import class_accuracy
from fedge.report.series import curve, elapsed
from fedge.report.style import BEST, MOST_LINES, PALETTE, looks
from fedge.report.summary import cell, columns, summary_rows

from .test_report import EVIL, Page, write_run

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
GREY = PALETTE[-1]


def seeded(
    folder: Path, lr: float, seed: int, algorithm: str = "fedavg", label: str = "FedAvg", rounds: int = 8
) -> Path:
    """A run whose configuration states its seed, as those of a sweep do."""
    path = write_run(folder / f"{algorithm}-{lr}-{seed}", label, algorithm=algorithm, lr=lr, rounds=rounds, seed=seed)
    config = path / "config.toml"
    text = config.read_text().replace("[algorithm]\n", f"[algorithm]\nlabel = {json.dumps(label)}\n")
    config.write_text(f'{text}seed = {seed}\n\n[model]\nname = "mlp"\nseed = {seed}\n')
    return path


def sweep(folder: Path, rates: tuple[float, ...] = (0.1, 0.2), seeds: int = 3, **more: str) -> list[Path]:
    return [seeded(folder, lr, seed, **more) for lr in rates for seed in range(seeds)]


# Groups


def test_runs_that_differ_in_their_seeds_are_one_group(tmp_path: Path) -> None:
    groups = grouped(read_all(sweep(tmp_path)))
    assert [(group.label, group.seeds) for group in groups] == [("FedAvg (lr=0.1)", 3), ("FedAvg (lr=0.2)", 3)]
    assert [dict(group.fields) for group in groups] == [{"lr": "0.1"}, {"lr": "0.2"}]


def test_labels_of_runs_hold_only_what_differs(tmp_path: Path) -> None:
    labels = [run.label for run in read_all(sweep(tmp_path))]
    assert labels[:2] == ["FedAvg (lr=0.1, seed=0)", "FedAvg (lr=0.1, seed=1)"], "the model's seed follows from train's"


def test_equal_runs_are_not_taken_for_seeds(tmp_path: Path) -> None:
    runs = [seeded(tmp_path / name, 0.1, 0) for name in ("a", "b")]
    assert [group.seeds for group in grouped(read_all(runs))] == [1, 1]


def test_a_wrapped_step_size_is_a_field_like_any_other(tmp_path: Path) -> None:
    runs = sweep(tmp_path)
    wrapped = sweep(tmp_path, algorithm="fedova", label="FedOVA")
    for path in wrapped:
        config = path / "config.toml"
        config.write_text(re.sub(r"lr = (.*)\n", r'inner = {name = "fedavg", lr = \1}\n', config.read_text()))
    fields = [dict(group.fields) for group in grouped(read_all([*runs, *wrapped]))]
    assert fields[0] == {"algorithm": "fedavg", "lr": "0.1"}
    assert {one["lr"] for one in fields} == {"0.1", "0.2"}
    assert {one["algorithm"] for one in fields} == {"fedavg", "fedova"}


# Means and spreads, against NumPy and the standard library


def test_the_spread_is_the_sample_standard_deviation() -> None:
    values = [0.3, 0.5, 0.9]
    found = spread([*values, None])
    assert found is not None
    assert found.mean == pytest.approx(statistics.mean(values))
    assert found.deviation == pytest.approx(statistics.stdev(values))
    assert found.runs == 3
    assert spread([0.3]) == (0.3, None, 1)
    assert spread([None]) is None


@pytest.mark.parametrize("against", ["rounds", "MB", "seconds"])
def test_a_band_is_the_mean_round_by_round(tmp_path: Path, against: str) -> None:
    runs = read_all(sweep(tmp_path, rates=(0.1,)))
    found = band(runs, "test_accuracy", against)  # type: ignore[arg-type]
    table = np.array([[record["test_accuracy"] for record in run.rounds] for run in runs])
    np.testing.assert_allclose(found.y, table.mean(0))
    np.testing.assert_allclose(found.deviation, table.std(0, ddof=1))
    np.testing.assert_allclose(found.x, np.mean([elapsed(run, against) for run in runs], 0))  # type: ignore[arg-type]


def test_a_shorter_run_counts_as_far_as_it_goes(tmp_path: Path) -> None:
    paths = [seeded(tmp_path, 0.1, 0, rounds=8), seeded(tmp_path, 0.1, 1, rounds=8)]
    lines = (paths[1] / "rounds.jsonl").read_text().splitlines(keepends=True)
    (paths[1] / "rounds.jsonl").write_text("".join(lines[:3]))
    runs = read_all(paths)
    found = band(runs, "test_accuracy", "rounds")
    assert found.x == list(range(1, 9))
    assert found.y[3:] == curve(runs[0], "test_accuracy").y[3:]
    assert found.deviation[3:] == [0.0] * 5


def test_a_row_is_a_mean_and_says_how_many_reached_the_target(tmp_path: Path) -> None:
    runs = read_all(sweep(tmp_path, rates=(0.1,)))
    best = sorted(max(record["test_accuracy"] for record in run.rounds) for run in runs)
    target = (best[0] + best[1]) / 2
    head, ((label, count, rounds, *cells),) = summary_rows(grouped(runs), columns(target))
    assert (label, count, rounds) == ("FedAvg", "3", "8")
    row = dict(zip(head[3:], cells, strict=True))
    assert row["best test accuracy (%)"] == f"{100 * np.mean(best):.1f} ± {100 * np.std(best, ddof=1):.1f}"
    assert row["MB up"] == "8.10", "no spread where there is none"
    reached = next(value for key, value in row.items() if key.startswith("rounds to"))
    assert reached is not None
    assert reached.endswith("(2 of 3)")


# Pictures


def test_a_group_is_one_line_with_a_band(tmp_path: Path) -> None:
    (axes,) = accuracy(read_all(sweep(tmp_path))).axes
    assert len(axes.get_lines()) == 2
    assert len(axes.collections) == 2
    figure = class_accuracy(read_all(sweep(tmp_path / "more")))
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["FedAvg (lr=0.1)", "FedAvg (lr=0.2)"]


def test_of_many_only_the_best_have_a_colour(tmp_path: Path) -> None:
    rates = tuple(round(0.01 * (at + 1), 2) for at in range(MOST_LINES + 3))
    runs = read_all(sweep(tmp_path, rates, seeds=1))
    groups = grouped(runs)
    coloured = [group for group, look in zip(groups, looks(groups), strict=True) if look.coloured]
    scores = sorted((run.summary["final_accuracy"] for run in runs), reverse=True)
    assert sorted((group.runs[0].summary["final_accuracy"] for group in coloured), reverse=True) == scores[:BEST]
    assert GREY not in {look.colour for look in looks(groups) if look.coloured}, "the others are grey"
    texts = [text.get_text() for text in accuracy(runs).legends[0].get_texts()]
    assert len(texts) == BEST + 1
    assert texts[-1] == f"{len(rates) - BEST} others"


def test_a_loss_of_another_kind_is_marked(tmp_path: Path) -> None:
    runs = read_all([seeded(tmp_path, 0.1, 0), seeded(tmp_path, 0.1, 0, "fedova", "FedOVA")])
    texts = [text.get_text() for text in loss(runs).legends[0].get_texts()]
    assert texts == ["FedAvg", "FedOVA †"]
    page = write_report([run.path for run in runs], tmp_path / "out").read_text()
    assert "† FedOVA: a loss of another kind (one-vs-all" in page
    alone = write_report([runs[1].path], tmp_path / "alone").read_text()
    assert "of another kind" not in alone


# The page


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty runs of fifteen configurations, one with a hostile name."""
    folder = tmp_path_factory.mktemp("many")
    rates = (0.02, 0.05, 0.1, 0.2, 0.4)
    for algorithm, label in (("fedavg", "FedAvg"), ("fedova", "FedOVA"), ("fedprox", EVIL)):
        sweep(folder, rates, seeds=2, algorithm=algorithm, label=label)
    return write_report(sorted(path.parent for path in folder.glob("*/rounds.jsonl")), folder)


def test_the_page_of_many_is_safe_and_short(many: Path) -> None:
    page = Page(many.read_text("utf-8"))
    assert "script" not in page.tags
    assert len(page.ids) == len(set(page.ids))
    assert all(reference.startswith(("#", "data:")) for reference in page.references)
    assert "30 runs of 15 configurations" in page.text
    assert "All 30 runs" in page.text
    assert "mean ± sample standard deviation" in page.text
    assert "prefers-color-scheme: dark" in page.text
    styles = page.text[page.text.index("<style>") : page.text.index("</style>")]
    assert "alert" not in styles, "nothing from a file is part of a style"


def test_every_value_of_a_field_has_a_box(many: Path) -> None:
    text = many.read_text("utf-8")
    boxes = re.findall(r'<input type="checkbox" id="(f\d+v\d+)" autocomplete="off" checked> ([^<]*)</label>', text)
    assert [value for _, value in boxes] == ["fedavg", "fedova", "fedprox", "0.02", "0.05", "0.1", "0.2", "0.4"]
    for name, _ in boxes:
        assert f"main:has(#{name}:not(:checked)) .{name} {{ display: none; }}" in text


def test_few_runs_need_no_filter(tmp_path: Path) -> None:
    groups = grouped(read_all(sweep(tmp_path)))
    assert Filters(groups).html() == ""


def test_files_of_figures_hold_no_marks_of_the_page(many: Path) -> None:
    for path in (many.parent / "figures").glob("*.svg"):
        ids = re.findall(r'id="([^"]*)"', path.read_text())
        assert len(ids) == len(set(ids)), path


def test_a_run_that_failed_is_said(tmp_path: Path) -> None:
    paths = sweep(tmp_path)
    (paths[0] / "summary.json").unlink()
    (paths[0] / "failure.json").write_text(json.dumps({"failed": "round 3: <b>not finite</b>"}))
    text = write_report(paths, tmp_path / "out").read_text()
    assert "FedAvg (lr=0.1, seed=0) failed: round 3: &lt;b&gt;not finite&lt;/b&gt;" in text
    assert "1 of 3 runs failed: 8 of 8" in text


def test_a_run_that_is_not_done_counts_in_no_mean_of_those_that_are(tmp_path: Path) -> None:
    paths = sweep(tmp_path, rates=(0.1,))
    (final,) = [one for one in columns(None) if one.title == "final test accuracy (%)"]
    done = [final.value(run) for run in read_all(paths[1:])]
    (paths[0] / "summary.json").unlink()
    lines = (paths[0] / "rounds.jsonl").read_text().splitlines(keepends=True)
    (paths[0] / "rounds.jsonl").write_text(lines[0])
    (group,) = grouped(read_all(paths))
    mean, spread_ = statistics.mean(done), statistics.stdev(done)
    assert cell(group, final) == f"{100 * mean:.1f} ± {100 * spread_:.1f} (2 of 3)"
    for path in paths[1:]:
        (path / "summary.json").unlink()
        rounds = path / "rounds.jsonl"
        rounds.write_text("".join(rounds.read_text().splitlines(keepends=True)[:4]))
    (group,) = grouped(read_all(paths))
    assert "(" not in str(cell(group, final)), "where none is done, all count"


UNTICK = """<script>
document.getElementById("f0v1").click();
const shown = (one) => getComputedStyle(one).display !== "none";
const count = (which) => [...document.querySelectorAll(which)].filter(shown).length;
const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
const rows = count("section:first-child > .wide tbody tr"), lines = count("figure:first-child svg g.f0v1");
document.title = [rows, lines, wide].join(" ");
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
def test_in_a_browser_a_box_hides_rows_and_lines_and_nothing_is_too_wide(many: Path, tmp_path: Path) -> None:
    """The script belongs to the test: the page has none, and forbids it."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", many.read_text("utf-8"))
    (tmp_path / "page.html").write_text(text.replace("</body>", f"{UNTICK}</body>"))
    done = subprocess.run(
        [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--window-size=500,900", "--dump-dom", (tmp_path / "page.html").as_uri()],
        capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    found = re.search(r"<title>(\d+) (\d+) (-?\d+)</title>", done.stdout)
    assert found is not None
    assert found.groups() == ("10", "0", "0"), (
        "rows left of 15, lines left of the hidden ones, pixels beyond the window"
    )
