"""One HTML page of runs: no script, no request, everything from the files escaped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from fedge.report.curves import NOISY
from fedge.report.figures import (
    MOST_FEDERATIONS,
    MOST_TIMELINES,
    MOST_UNASKED,
    Picture,
    Section,
    drawn_metrics,
    federations,
    listed,
    with_timeline,
)
from fedge.report.filters import Filters
from fedge.report.groups import Group, grouped
from fedge.report.losses import other_losses
from fedge.report.read import RunFolder
from fedge.report.series import curve, has_no_accuracy, last
from fedge.report.style import BEST, MOST_LINES, looks, rank
from fedge.report.svg import inline
from fedge.report.tables import MOST_DROPS, device_table, dropouts_table, summary_table, table

TEMPLATE = Path(__file__).with_name("template.html")
BYTES = (
    "Bytes are payload: the raw size of every tensor that is sent or uploaded, an upload's weight "
    "and the setup before the first round included; down counts one copy for each client "
    "(unicast), and 1 MB is 1,000,000 bytes."
)
CLOSED = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # what a page may load: nothing
LIVE_POLICY = f"{CLOSED}; script-src 'self'; connect-src 'self'"  # of one that is served
MANY = 6  # names in one line
DEFAULT_TARGET = (
    " It is the default: 90 % of the best accuracy any run reached that did not fail, rounded down to a whole percent."
)
DEVICES = (
    "Time and energy are computed from the devices of the table [edge]: bytes over rates, counted FLOPs over speed. "
    "Not counted is what a radio draws before and after a message, which for small models is more than all the rest. "
    "Accuracy by kind of device is that of every class, weighted by what clients of the kind hold."
)
Drawn = Sequence[tuple[Picture, str]]  # with the SVG document of each


class Goal(NamedTuple):
    """The test accuracy to which rounds and MB are counted, and whether anybody chose it."""

    target: float | None
    default: bool = False


def page(runs: Sequence[RunFolder], drawn: Drawn, goal: Goal, live: str = "") -> str:
    """The whole page; `live` is the element that keeps one up to date that is served."""
    names = ", ".join(dict.fromkeys(run.name for run in runs))
    groups = grouped(runs)
    filters = Filters(groups)
    return Template(TEMPLATE.read_text("utf-8")).substitute(
        title=escape(f"fedge report: {names}" if names else "fedge report"),
        subtitle=escape(_subtitle(runs, groups)),
        policy=LIVE_POLICY if live else CLOSED,
        styles=filters.css(),
        sections="\n".join(_sections(runs, groups, filters, drawn, goal)),
        live=live,
    )


def _subtitle(runs: Sequence[RunFolder], groups: Sequence[Group]) -> str:
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    of = "" if len(groups) == len(runs) else f" of {len(groups)} configurations"
    names = f": {', '.join(group.label for group in groups)}" if len(groups) <= MANY else ""
    return f"{count}{of}{names}" if runs else "No run has a round yet."


def _sections(
    runs: Sequence[RunFolder], groups: Sequence[Group], filters: Filters, drawn: Drawn, goal: Goal
) -> Iterator[str]:
    if not runs:
        return
    classes = filters.classes()
    shown = list(zip(groups, classes, strict=True))
    if len(groups) > MOST_LINES:
        shown.sort(key=lambda one: rank(one[0]))
    yield _section(
        "Summary",
        filters.html(),
        summary_table([group for group, _ in shown], goal.target, [one for _, one in shown]),
        *_every_run(runs, shown, goal.target),
        *_notes(runs, groups, goal),
    )
    named = [(one, escape(group.label)) for one, group in zip(classes, groups, strict=True)]
    yield _section("Accuracy, loss and what they cost", *_curves(groups, drawn, named), *_undrawn(runs))
    if by_class := _figures(drawn, "classes"):
        yield _section("By class", by_class)
    if on_devices := _figures(drawn, "devices"):
        tables = filter(None, (device_table(runs), on_devices))
        yield _section("On the devices", *tables, *_untimed(runs), _note(DEVICES))
    yield _section("Federation", _federation(runs, drawn))
    if drops := _figures(drawn, "dropouts"):
        yield _section("Drop-outs", drops, *_dropouts(runs))
    yield _section("How bytes are counted", f"<p>{escape(BYTES)}</p>")
    yield _section("Configuration", *map(_configuration, groups))
    yield _section("Versions", _versions(runs))


def _undrawn(runs: Sequence[RunFolder]) -> Iterator[str]:
    """Which metrics have no figure, and where they are."""
    if gone := drawn_metrics(runs)[1]:
        why = f"of the metrics that are computed without being asked for, the first {MOST_UNASKED} are drawn"
        yield _note(f"No figure of {', '.join(gone)}: {why}. rounds.jsonl of each run and fedge.results have all.")


def _untimed(runs: Sequence[RunFolder]) -> Iterator[str]:
    """Of which runs the time lines are, where not all are drawn."""
    found, count = with_timeline(runs), sum(1 for run in runs if last(run, "timeline"))
    if count > min(len(found), MOST_TIMELINES):
        which = "every" if len(found) <= MOST_TIMELINES else f"the first {MOST_TIMELINES} of {len(found)}"
        of = f"{which} configuration{'s' * (which != 'every')}"
        yield _note(f"Time lines of the first run of {of}; rounds.jsonl of each of the {count} runs has its own.")


def _every_run(runs: Sequence[RunFolder], shown: Sequence[tuple[Group, str]], target: float | None) -> Iterator[str]:
    """Behind the means, the runs themselves."""
    if len(shown) == len(runs):
        return
    single = [(Group(run.label, (run,), {}), classes) for group, classes in shown for run in group.runs]
    every = summary_table([group for group, _ in single], target, [classes for _, classes in single])
    yield f"<details>\n<summary>All {len(runs)} runs</summary>\n{every}\n</details>"


def _section(title: str, *parts: str) -> str:
    body = "\n".join(parts)
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>"


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _notes(runs: Sequence[RunFolder], groups: Sequence[Group], goal: Goal) -> Iterator[str]:
    if len(groups) < len(runs):
        yield _note(
            "Runs that differ in their seeds are one row: mean ± sample standard deviation. (2 of 3): so many of them "
            "have such a value, and only they count."
        )
    if any(run.failed for run in runs):
        yield _note("A run that failed has no results in this table, whatever it reached before.")
    if goal.target is not None and has_no_accuracy(runs):
        yield _note(f"The target {goal.target:g} counts nothing: a target is a test accuracy, and no run has one.")
    elif goal.target is not None:
        yield _note(
            f"The target is a test accuracy of {100 * goal.target:.4g} %; what it took is read at the first evaluated "
            f"round that reaches it.{DEFAULT_TARGET * goal.default}"
        )
    for run in runs:
        if run.failed:
            yield _note(f"{run.label} failed: {run.failed}")
    if held := [run.label for run in runs if run.judged_on == "validation"]:
        which = "All runs" if len(held) == len(runs) else listed(held, MANY)
        yield _note(
            f"{which}: judged on a validation part held out of the training set. It stands in the place of the "
            "test set, and what is called test here is that part."
        )
    over = sorted({str(run.summary["final_rounds"]) for run in runs if "final_rounds" in run.summary}, key=len)
    last = "the last round" if over == ["1"] else f"a mean over the last {' or '.join(over)} rounds"
    mean = f", {last}" if over else ""
    yield _note(
        f"Final is as the run's summary states it{mean}; of an unfinished run, the last evaluated round. "
        "– means not reached or not recorded."
    )


def _figures(drawn: Drawn, section: Section, named: Sequence[tuple[str, str]] = ()) -> str:
    """The figures of one section, or nothing."""
    shown = [
        f"<figure>\n<figcaption>{escape(picture.caption)}</figcaption>\n"
        f"{inline(svg, picture.name, escape(picture.caption), named)}\n</figure>"
        for picture, svg in drawn
        if picture.section == section
    ]
    figures = "\n".join(shown)
    return f'<div class="figures">\n{figures}\n</div>' if shown else ""


def _curves(groups: Sequence[Group], drawn: Drawn, named: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield _figures(drawn, "curves", named) or _note("No round has been evaluated yet.")
    if any(group.seeds > 1 for group in groups):
        yield _note("A line is the mean over seeds, its band one standard deviation to either side.")
    if sum(look.coloured for look in looks(groups)) < len(groups):
        yield _note(
            f"The {BEST} best have a colour, by their final accuracy; the others are grey. Point at a line for its "
            "name, or at a row of the table to see its lines alone."
        )
    if other := other_losses(groups):
        which = listed([groups[at].label for at in other], MANY)
        kinds = "; ".join(dict.fromkeys(filter(None, other.values())))
        yield _note(f"† {which}: a loss of another kind ({kinds}), not to be compared with the others'.")
    if any(len(curve(run, "test_loss").y) > NOISY for group in groups for run in group.runs):
        yield _note(f"More than {NOISY} points: thin as measured, thick a running mean of 5.")


def _federation(runs: Sequence[RunFolder], drawn: Drawn) -> str:
    """The heat maps, and which runs have none."""
    without = [run.label for run in runs if not any(run.clients.get("labels") or [])]
    parts = [_figures(drawn, "federation")]
    if (count := len(federations(runs))) > MOST_FEDERATIONS:
        parts.append(
            _note(f"The first {MOST_FEDERATIONS} of {count} federations; clients.json of each run has its own.")
        )
    if without:
        parts.append(_note(f"No label counts (clients.json) for {listed(without, MANY)}."))
    return "\n".join(filter(None, parts))


def _dropouts(runs: Sequence[RunFolder]) -> Iterator[str]:
    listed, count = dropouts_table(runs)
    shown = f" (the first {MOST_DROPS}; all are in rounds.jsonl)" if count > MOST_DROPS else ""
    title = f"{count:,} dropped {'reply' if count == 1 else 'replies'}{shown}"
    yield f"<details>\n<summary>{escape(title)}</summary>\n{listed}\n</details>"


def _configuration(group: Group) -> str:
    run = group.runs[0]
    source = run.source.strip() or "config.toml is not there"
    more = f", the first of {group.seeds} runs" if group.seeds > 1 else ""
    return f"<details>\n<summary>{escape(group.label + more)}</summary>\n<pre>{escape(source)}</pre>\n</details>"


def _versions(runs: Sequence[RunFolder]) -> str:
    """Whatever the summaries say about the software, the machine and the model, and what drew this page."""
    stated: dict[str, list[str]] = {}
    for run in runs:
        stated.setdefault(json.dumps(_about(run.summary)), []).append(run.label)
    about = [json.loads(one) for one in stated]
    keys = list(dict.fromkeys(key for one in about for key in one))
    several = len(stated) == 1 < len(runs)
    names = ["all runs"] if several else [listed(labels, 3) for labels in stated.values()]
    rows = [[name, *(one.get(key) for key in keys)] for name, one in zip(names, about, strict=True)]
    drew = _note(f"Drawn by fedge {_version('fedge')} with matplotlib {_version('matplotlib')}.")
    return f"{table(['algorithm', *keys], rows, words=len(keys) + 1)}\n{drew}" if keys else drew


def _about(summary: dict[str, Any]) -> dict[str, str]:
    about = {"fedge": summary.get("version")}
    if isinstance(versions := summary.get("versions"), dict):
        about |= versions
    about |= {key: summary.get(key) for key in ("device", "parameters")}
    words = {key: f"{value:,}" if isinstance(value, int) else value for key, value in about.items()}
    return {str(key): str(value) for key, value in words.items() if value is not None}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed as a package)"
