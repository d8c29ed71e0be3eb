"""Reports of synthetic run folders: series by hand, labels, and a page that is whole, escaped and asks for nothing."""

from __future__ import annotations

import json
import math
import os
import random
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedge import report
from fedge.report import (
    MissingExtra,
    ReportError,
    curve,
    default_target,
    read,
    read_all,
    series,
    style,
    to_target,
    write_report,
)
from fedge.report.curves import _scale, accuracy
from fedge.report.figures import drawn_metrics
from fedge.report.heatmap import class_accuracy, partition_figure
from fedge.report.series import elapsed, megabytes, running_mean
from fedge.report.style import _columns
from fedge.report.summary import number
from fedge.runs.experiments import failure, is_finished

CONFIG = """[data]
name = "digits"

[partition]
kind = "labels_per_client"
clients = 100
labels = 2

[algorithm]
name = "{algorithm}"
lr = {lr}

[train]
rounds = {rounds}
"""


def write_run(
    folder: Path,
    label: str = "FedAvg",
    *,
    algorithm: str = "fedavg",
    lr: float = 0.1,
    rounds: int = 20,
    drop: float = 0.0,
    train: bool = False,
    seed: int = 0,
) -> Path:
    """A run folder as training leaves it: a noisy curve, 2 labels per client, some drop-outs."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    records = [noisy_record(number, lr, drop, train, rng) for number in range(1, rounds + 1)]
    scores = [record["test_accuracy"] for record in records]
    (folder / "config.toml").write_text(CONFIG.format(algorithm=algorithm, lr=lr, rounds=rounds))
    write_lines(folder / "rounds.jsonl", records)
    write_lines(folder / "ledger.jsonl", [{"round": 0, "task": "share", "down": 500_000, "up": 100_000}])
    (folder / "clients.json").write_text(json.dumps(two_labels(100, 10, random.Random(0))))
    summary = {"name": folder.name, "algorithm": label, "best_accuracy": max(scores), "final_accuracy": scores[-1]}
    (folder / "summary.json").write_text(
        json.dumps(summary | {"final_rounds": 2, "versions": {"torch": "2.9.1"}, "parameters": 1234})
    )
    return folder


def noisy_record(number: int, lr: float, drop: float, train: bool, rng: random.Random) -> dict[str, Any]:
    score = min(1.0, max(0.0, 0.95 - 0.85 * math.exp(-lr * number) + rng.gauss(0, 0.02)))
    record: dict[str, Any] = {"round": number, "cohort": sorted(rng.sample(range(100), 20))}
    record |= {"up_bytes": 1_000_000, "down_bytes": 2_000_000, "seconds": 0.5}
    record["dropped"] = [
        {"client": client, "task": "train", "reason": "not finite: <w>"}
        for client in record["cohort"]
        if rng.random() < drop
    ]
    record |= {"test_accuracy": score, "test_loss": 2.3 * (1 - score) + 0.05}
    record["test_class_accuracy"] = [None, *(min(1.0, max(0.0, score + rng.gauss(0, 0.05))) for _ in range(9))]
    return record | ({"train_accuracy": score, "train_loss": 1 - score} if train else {})


def two_labels(clients: int, classes: int, rng: random.Random) -> dict[str, Any]:
    counts = [[0] * classes for _ in range(clients)]
    for row in counts:
        for held in rng.sample(range(classes), 2):
            row[held] = rng.randrange(4, 12)
    return {"classes": classes, "names": [], "labels": counts, "clients": clients}


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def bare_run(folder: Path, records: list[dict[str, Any]]) -> Path:
    """Nothing but rounds.jsonl: a run that has just begun."""
    folder.mkdir(parents=True)
    write_lines(folder / "rounds.jsonl", records)
    return folder


# Series


def three_rounds(folder: Path) -> report.RunFolder:
    """Rounds of 1 + 2 MB and 2 s, the second not evaluated, after a setup of 0.6 MB."""
    cost = {"up_bytes": 1_000_000, "down_bytes": 2_000_000, "seconds": 2.0, "cohort": [0], "dropped": []}
    marks = [{"test_accuracy": 0.5, "test_loss": 1.0}, {}, {"test_accuracy": 0.8, "test_loss": float("nan")}]
    bare_run(folder, [{"round": at} | cost | mark for at, mark in enumerate(marks, 1)])
    rows = [{"round": 0, "down": 500_000, "up": 100_000}, {"round": 1, "down": 2_000_000, "up": 1_000_000}]
    write_lines(folder / "ledger.jsonl", rows)
    return read(folder)


def test_series_hold_the_evaluated_rounds_only(tmp_path: Path) -> None:
    run = three_rounds(tmp_path / "run")
    assert curve(run, "test_accuracy") == ([1, 3], [0.5, 0.8])
    assert curve(run, "test_accuracy", "seconds") == ([2.0, 6.0], [0.5, 0.8])
    assert curve(run, "test_loss") == ([1], [1.0])  # NaN has no place on an axis
    assert curve(run, "train_accuracy") == ([], [])


def test_megabytes_include_the_setup(tmp_path: Path) -> None:
    run = three_rounds(tmp_path / "run")
    assert elapsed(run, "MB") == pytest.approx([3.6, 6.6, 9.6])
    assert (megabytes(run, "up"), megabytes(run, "down")) == (3.1, 6.5)


def test_the_target_is_reached_at_the_first_evaluated_round(tmp_path: Path) -> None:
    run = three_rounds(tmp_path / "run")
    assert to_target(run, 0.5)[:3] == pytest.approx((1, 3.6, 2.0))
    assert to_target(run, 0.6)[:3] == pytest.approx((3, 9.6, 6.0))
    assert to_target(run, 0.81) is None


@pytest.mark.parametrize(("best", "target"), [(0.8, 0.72), (0.7, 0.63), (1.0, 0.9), (0.955, 0.85)])
def test_the_default_target_is_a_whole_percent(tmp_path: Path, best: float, target: float) -> None:
    scores = [{"round": 1, "test_accuracy": best}, {"round": 2, "test_accuracy": 0.1}]
    assert default_target([read(bare_run(tmp_path / "run", scores))]) == target


def test_a_run_without_accuracy_has_no_target(tmp_path: Path) -> None:
    assert default_target([read(bare_run(tmp_path / "run", [{"round": 1, "test_loss": 0.5}]))]) is None


def test_running_mean_is_a_centred_average() -> None:
    values = np.random.default_rng(0).normal(size=30).tolist()
    assert running_mean(values)[2:-2] == pytest.approx(np.convolve(values, np.ones(5) / 5, "valid"))
    assert running_mean(values)[0] == pytest.approx(np.mean(values[:3]))


# Reading


def test_a_last_line_cut_off_is_left_out(tmp_path: Path) -> None:
    path = bare_run(tmp_path / "run", [{"round": 1}, {"round": 2}]) / "rounds.jsonl"
    path.write_text(path.read_text() + '{"round": 3, "test_acc')
    assert [record["round"] for record in read(path.parent).rounds] == [1, 2]


def test_a_broken_line_before_the_last_is_an_error(tmp_path: Path) -> None:
    path = bare_run(tmp_path / "run", [{"round": 1}]) / "rounds.jsonl"
    path.write_text('{"round": 1\n' + path.read_text())
    with pytest.raises(ReportError, match=r"line 1 of .*rounds\.jsonl is not a JSON object"):
        read(path.parent)


def test_a_round_that_is_no_number_is_known_by_its_place(tmp_path: Path) -> None:
    records = [{"round": one, "test_accuracy": 0.5} for one in (1, "x", 3)]
    run = read(bare_run(tmp_path / "run", records))
    assert [series._round(run, at) for at in range(3)] == [1, 2, 3]


def test_a_summary_that_is_nested_without_end_is_none(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("[" * 100_000)
    (tmp_path / "failure.json").write_text("[" * 100_000)
    assert (is_finished(tmp_path, 1), failure(tmp_path)) == (False, None)


def test_a_missing_folder_and_a_foreign_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"nowhere is not a folder: expected a run folder that holds rounds\.jsonl"):
        read(tmp_path / "nowhere")
    with pytest.raises(ReportError, match=rf"{tmp_path} holds no rounds\.jsonl: expected a run folder"):
        read(tmp_path)
    with pytest.raises(ReportError, match="no run folder was given"):
        read_all([])


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = bare_run(tmp_path / "run", [])
    (folder / "summary.json").write_text("[1]")
    with pytest.raises(ReportError, match=r"summary\.json is not a JSON object \(found list\)"):
        read(folder)
    (folder / "summary.json").unlink()
    (folder / "config.toml").write_text("lr =")
    with pytest.raises(ReportError, match=r"config\.toml is not TOML"):
        read(folder)


@pytest.mark.parametrize("name", ["rounds.jsonl", "summary.json", "config.toml"])
def test_a_file_without_end_is_not_read(name: str, tmp_path: Path) -> None:
    """200 GB of holes take no room on the disk."""
    folder = write_run(tmp_path / "run")
    os.truncate(folder / name, 200 << 30)
    with pytest.raises(ReportError, match=rf"cannot read .*{name}: it has 214748364800 bytes, and 1073741824 are read"):
        read(folder)


@pytest.mark.parametrize("name", ["figures", ".report.html.tmp"])
def test_nothing_is_written_through_a_link_in_a_run_folder(name: str, tmp_path: Path) -> None:
    """As a folder from somebody else can hold it, to the reader's own files."""
    folder, mine = write_run(tmp_path / "run"), tmp_path / "mine"
    if name == "figures":
        mine.mkdir()
        (folder / name).symlink_to(mine)
        with pytest.raises(ReportError, match=r"cannot write to .*figures: it is a link, and nothing is written"):
            write_report([folder])
        assert not list(mine.iterdir())
        return
    mine.write_text("precious")
    (folder / name).symlink_to(mine)
    assert write_report([folder]).is_file()
    assert mine.read_text() == "precious"


@pytest.mark.parametrize("file", ["rounds.jsonl", "summary.json"])
def test_what_cannot_be_drawn_or_written_is_one_line(file: str, tmp_path: Path) -> None:
    """A number that no axis has room for, and half a character; what was there before stays."""
    folder = write_run(tmp_path / "run")
    page = write_report([folder])
    before = {one: one.read_bytes() for one in [page, *(folder / "figures").iterdir()]}
    if file == "rounds.jsonl":
        records = [json.loads(line) for line in (folder / file).read_text().splitlines()]
        records[2]["test_accuracy"] = 10**18
        write_lines(folder / file, records)
    else:
        summary = json.loads((folder / file).read_text()) | {"final_rounds": "\ud800"}
        (folder / file).write_text(json.dumps(summary))
    with pytest.raises(ReportError, match=rf"cannot show {folder}: a file in it holds something") as found:
        write_report([folder])
    assert "\n" not in str(found.value)
    assert {one: one.read_bytes() for one in before} == before


# Labels


def test_labels_are_the_algorithms_where_those_differ(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "a", "FedAvg"), write_run(tmp_path / "b", "FedOVA(FedAvg)", algorithm="fedova")]
    assert [run.label for run in read_all([*paths, paths[0]])] == ["FedAvg", "FedOVA(FedAvg)"]


def test_equal_algorithms_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / f"run{lr}", lr=lr) for lr in (0.1, 0.2)]
    assert [run.label for run in read_all(paths)] == ["FedAvg (lr=0.1)", "FedAvg (lr=0.2)"]


def test_policies_are_told_apart_by_their_names(tmp_path: Path) -> None:
    policies = ['"none"', '{name = "deadline", seconds = 0.12}', '{name = "first_of", count = 15}']
    paths = [write_run(tmp_path / f"run{at}") for at in range(3)]
    for path, policy in zip(paths, policies, strict=True):
        config = path / "config.toml"
        config.write_text(config.read_text() + f"\n[edge]\npolicy = {policy}\n")
    labels = [run.label for run in read_all(paths)]
    told = ["none", "deadline(seconds=0.12)", "first_of(count=15)"]
    assert labels == [f"FedAvg (policy={one})" for one in told]
    two = ["FedAvg (policy=none)", "FedAvg (policy=deadline)"]
    assert [run.label for run in read_all(paths[:2])] == two


@pytest.mark.parametrize(("held", "label"), [((), "test "), ((0,), "validation or test "), ((0, 1), "validation ")])
def test_what_was_held_out_of_the_training_set_is_called_so(tmp_path: Path, held: tuple[int, ...], label: str) -> None:
    folders = [write_run(tmp_path / name, name) for name in ("a", "b")]
    for at in held:
        config = folders[at] / "config.toml"
        config.write_text(config.read_text().replace("[data]\n", "[data]\nvalidation = 0.1\n"))
    runs = read_all(folders)
    assert accuracy(runs).axes[0].get_ylabel() == f"{label}accuracy (%)"
    page = write_report(folders, tmp_path / "out").read_text()
    assert ("held out of the training set" in page) == bool(held)


def test_equal_configurations_are_told_apart_by_name_then_path(tmp_path: Path) -> None:
    same = [write_run(tmp_path / "a"), write_run(tmp_path / "b")]
    assert [run.label for run in read_all(same)] == ["FedAvg (a)", "FedAvg (b)"]
    named = [*same, write_run(tmp_path / "deep" / "a")]
    assert [run.label for run in read_all(named)] == [f"FedAvg ({path})" for path in named]


# The page


class Page(HTMLParser):
    """Collects tags, ids and references."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.tags, self.ids, self.references = text, set[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for key, value in attrs:
            if key == "id":
                self.ids.append(str(value))
            if key in ("href", "src", "xlink:href", "action", "data"):
                self.references.append(str(value))


EVIL = "<script>alert('x')</script> & $a$"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of three runs: one with drop-outs and a hostile name, one unfinished."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "plain", train=True)
    write_run(folder / "evil", EVIL, lr=0.2, drop=0.2, seed=1)
    cut = write_run(folder / "cut", algorithm="feddane", lr=0.3, seed=2)
    (cut / "summary.json").unlink()
    (cut / "clients.json").unlink()
    lines = (cut / "rounds.jsonl").read_text().splitlines(keepends=True)
    (cut / "rounds.jsonl").write_text("".join(lines[:8]) + lines[8][:30])
    return write_report([folder / name for name in ("plain", "evil", "cut")])


@pytest.fixture(scope="module")
def page(written: Path) -> Page:
    return Page(written.read_text("utf-8"))


def test_the_report_lies_where_all_runs_lie(written: Path) -> None:
    assert written.name == "report.html"
    assert (written.parent / "plain" / "rounds.jsonl").is_file()
    assert not list(written.parent.rglob("*.tmp"))


def test_every_figure_is_written_twice(written: Path) -> None:
    names = {f"{what}_{against}" for what in ("accuracy", "loss") for against in ("rounds", "mb", "seconds")}
    names |= {"class_accuracy", "clients", "dropouts"}
    assert {path.name for path in (written.parent / "figures").iterdir()} == {
        f"{name}.{kind}" for name in names for kind in ("png", "svg")
    }


def test_the_page_asks_for_nothing(page: Page) -> None:
    assert not re.search(r"https?://", page.text)
    assert page.references
    assert all(reference.startswith(("#", "data:")) for reference in page.references)
    assert not re.search(r"url\((?!#)|@import|@font-face", page.text)
    assert 'rel="icon" href="data:,"' in page.text


def test_what_comes_from_the_files_is_escaped(page: Page) -> None:
    assert "script" not in page.tags
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; $a$" in page.text
    assert "not finite: &lt;w&gt;" in page.text


def test_ids_are_unique_and_every_reference_has_one(page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    pointed = {r[1:] for r in page.references if r.startswith("#")} | set(re.findall(r"url\(#([^)]*)\)", page.text))
    assert pointed
    assert pointed <= set(page.ids)


def test_the_title_names_an_experiment_once(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", "FedAvg"), write_run(tmp_path / "b", "FedOVA")]
    for run in runs:
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps(summary | {"name": "digits"}))
    text = write_report(runs, tmp_path).read_text()
    (runs[0] / "summary.json").unlink()
    (runs[0] / "config.toml").write_text(f'name = "digits"\n{CONFIG.format(algorithm="fedavg", lr=1, rounds=20)}')
    assert read(runs[0]).name == "digits", "of an unfinished run too"
    assert "<h1>fedge report: digits</h1>" in text
    assert "2 runs: FedAvg, FedOVA" in text
    assert "<summary>FedOVA</summary>" in text
    assert text.count('<td class="n">10.0</td>') == 2, "seconds"


def test_the_page_says_what_it_should(page: Page) -> None:
    for words in (
        "8 of 20, unfinished",
        "The target is a test accuracy of",
        "Bytes are payload",
        "lr = 0.2",
        "the last 2 rounds",
        "2.9.1",
    ):
        assert words in page.text
    assert "No label counts (clients.json) for feddane." in page.text
    assert re.search(r"dropped replies \(the first 50; all are in rounds\.jsonl\)", page.text)
    assert page.text.count("not finite") == 50
    assert page.text.count("<svg ") == 9


def test_a_single_run_of_a_regression(tmp_path: Path) -> None:
    folder = bare_run(tmp_path / "run", [{"round": at, "test_loss": 10.0**-at} for at in (1, 2, 3)])
    written = write_report([str(folder)])
    text = written.read_text("utf-8")
    assert written == folder / "report.html"
    assert '<td class="n">0.001</td>' in text
    assert "accuracy (%)" not in text
    assert "The target" not in text


def test_a_run_without_a_round_has_a_page_and_no_figures(tmp_path: Path) -> None:
    written = write_report([bare_run(tmp_path / "run", [])], out=tmp_path / "out")
    assert written == tmp_path / "out" / "report.html"
    assert "No round has been evaluated yet." in written.read_text("utf-8")
    assert not (written.parent / "figures").exists()


def test_options_out_of_range_are_refused(tmp_path: Path) -> None:
    folder = bare_run(tmp_path / "run", [{"round": 1}])
    with pytest.raises(ReportError, match=r"target is 85, it must be above 0 and at most 1: write 0\.85"):
        write_report([folder], target=85)
    with pytest.raises(ReportError, match=r"page\.html, it must be a folder"):
        write_report([folder], out=tmp_path / "page.html")


# Figures


def test_accuracy_is_drawn_in_percent_and_training_thin(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run", train=True))
    test, train = accuracy([run]).axes[0].get_lines()
    assert np.asarray(test.get_ydata()) == pytest.approx([100 * y for y in curve(run, "test_accuracy").y])
    assert train.get_linewidth() < test.get_linewidth()
    assert train.get_color() == test.get_color()


def test_curves_on_top_of_each_other_are_told_apart(tmp_path: Path) -> None:
    runs = read_all([write_run(tmp_path / f"run{at}", f"run {at}") for at in range(7)])
    lines = accuracy(runs).axes[0].get_lines()
    assert len({repr(line._dash_pattern) for line in lines[:7]}) == 7  # type: ignore[attr-defined]
    assert len({(style.colour(at), style.stroke(at)) for at in range(56)}) == 56


@pytest.mark.parametrize(("lowest", "scale"), [(0.69, 60), (0.7, 70), (1.0, 90), (0.04, 0)])
def test_class_accuracy_is_coloured_from_the_ten_below_the_lowest(tmp_path: Path, lowest: float, scale: int) -> None:
    run = read(bare_run(tmp_path / "run", [{"round": 1, "test_class_accuracy": [None, lowest, 1.0]}]))
    axes = class_accuracy([run]).axes[0]
    assert axes.get_images()[0].get_clim() == (scale, 100)
    assert [text.get_text() for text in axes.texts] == [f"{100 * lowest:.0f}", "100"]


def test_figures_leave_pyplot_alone(page: Page) -> None:
    assert page.text
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_many_clients_wrap_into_strips_that_lose_none() -> None:
    figure = partition_figure([[at + 1, 0, 0] for at in range(601)], ["a", "b", "c"], total=5000)
    strips = [axes for axes in figure.axes if axes.get_images()]
    drawn = np.concatenate([axes.get_images()[0].get_array().filled(0)[0] for axes in strips])  # type: ignore[union-attr]
    assert drawn.tolist() == list(range(1, 602))
    assert strips[-1].get_xlabel() == "client (first 601 of 5,000)"


def test_a_ragged_partition_is_refused() -> None:
    with pytest.raises(ReportError, match=r"2 clients with \[1, 2\] classes"):
        report.partition_figure([[1], [1, 2]])


def test_a_headline_is_one_wide_picture(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", lr=0.2)]
    png = report.headline(runs, tmp_path / "docs" / "headline.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert (int.from_bytes(png[16:20]), int.from_bytes(png[20:24])) == (2200, 800)


@pytest.mark.parametrize(
    ("lengths", "columns"),
    [([5], 1), ([5, 5, 5], 3), ([30, 30, 30], 2), ([90, 90], 1), ([], 1), ([38] * 8 + [9], 1), ([20, 20, 5, 5], 2)],
)
def test_a_legend_takes_the_columns_that_fit(lengths: list[int], columns: int) -> None:
    assert _columns(lengths, 80) == columns


@pytest.mark.parametrize(
    ("measure", "values", "low", "high"),
    [
        ("f1", [0.2, 0.9], 0, 1.02),
        ("loss", [0.5, 1.0], 0, 1.5),
        ("r2", [-0.2, 0.9], -0.7, 1.4),
        ("rmse", [2, 9], 0, 9.5),
    ],
)
def test_bands_end_where_values_do(measure: str, values: list[float], low: float, high: float) -> None:
    axes = Figure().subplots()
    axes.plot([1, 2], values)
    axes.fill_between([1, 2], np.array(values) - (0.5 if measure != "rmse" else 4), np.array(values) + 0.5)
    axes.margins(0)
    _scale(axes, measure)
    assert axes.get_ylim() == pytest.approx((low, high))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123, "0.0123"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (12345.6, "12,346"), (7, "7")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


# Extras


DRAWING = ("figures", "curves", "dropouts", "heatmap", "style", "svg", "page", "tables")


def hide_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed, whatever has been imported before."""
    drawing = [f"fedge.report.{name}" for name in DRAWING]
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib" or name in drawing]:
        monkeypatch.delitem(sys.modules, name)
    for name in DRAWING:
        monkeypatch.delattr(report, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.mark.parametrize(
    "use", [lambda p: write_report([p]), lambda p: report.headline([p], p), lambda p: report.partition_figure([[1]])]
)
def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], Any]
) -> None:
    hide_matplotlib(monkeypatch)
    with pytest.raises(MissingExtra, match=re.escape("fedge report needs matplotlib: pip install 'fedge[report]'")):
        use(tmp_path)


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtra, match=re.escape("pip install 'fedge[report]'")):
        report.TensorBoard(tmp_path)


class Writer:
    """Stands in for TensorBoard's own writer."""

    def __init__(self, folder: str) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars[tag, step] = value

    def close(self) -> None:
        self.scalars["closed", 0] = 1


def test_tensorboard_gets_the_numbers_of_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    board = report.TensorBoard(tmp_path)
    board.log({"round": 3, "test_accuracy": 0.5, "test_loss": float("nan"), "up_bytes": 7, "dropped": [{}]})
    board.close()
    assert board._writer.scalars == {("test/accuracy", 3): 0.5, ("bytes/up", 3): 7, ("dropped", 3): 1, ("closed", 0): 1}


def test_exported_names_are_complete() -> None:
    assert sorted(report.__all__) == report.__all__
    assert all(hasattr(report, name) for name in report.__all__)


def test_metrics_that_were_asked_for_are_all_drawn_and_the_others_counted(tmp_path: Path) -> None:
    own, unasked = [f"mine{n}" for n in range(10)], [f"client_{n}" for n in range(10)]
    values = {f"test_{name}": 0.5 for name in (*unasked, *own)}
    run = bare_run(tmp_path / "run", [{"round": n, "test_loss": 1.0, "seconds": 0.1, **values} for n in (1, 2)])
    drawn, gone = drawn_metrics(read_all([run]))
    assert drawn == [*unasked[:8], *own]
    assert gone == unasked[8:]
    page = write_report([run], tmp_path).read_text()
    assert "No figure of client_8, client_9: of the metrics that are computed without being asked for" in page
