"""One HTML page of a few runs: no script, no request, everything from the files escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from string import Template
from typing import Any

from fedge.report.curves import NOISY
from fedge.report.figures import Picture, Section
from fedge.report.read import RunFolder
from fedge.report.series import curve
from fedge.report.svg import inline
from fedge.report.tables import MOST_DROPS, device_table, dropouts_table, summary_table, table

TEMPLATE = Path(__file__).with_name("template.html")
BYTES = (
    "Bytes are payload: the raw size of every tensor that is sent or uploaded, an upload's weight "
    "and the setup before the first round included; down counts one copy for each client "
    "(unicast), and 1 MB is 1,000,000 bytes."
)
DEVICES = (
    "Time and energy are computed from the devices of the table [edge]: bytes over rates, counted FLOPs over speed. "
    "Accuracy by kind of device is that of every class, weighted by what clients of the kind hold."
)
Drawn = Sequence[tuple[Picture, str]]  # with the SVG document of each


def page(runs: Sequence[RunFolder], drawn: Drawn, target: float | None) -> str:
    """The whole page."""
    names = ", ".join(dict.fromkeys(run.name for run in runs))
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    return Template(TEMPLATE.read_text("utf-8")).substitute(
        title=escape(f"fedge report: {names}"),
        subtitle=escape(f"{count}: {', '.join(run.label for run in runs)}"),
        sections="\n".join(_sections(runs, drawn, target)),
    )


def _sections(runs: Sequence[RunFolder], drawn: Drawn, target: float | None) -> Iterator[str]:
    yield _section("Summary", summary_table(runs, target), *_notes(runs, target))
    yield _section("Accuracy, loss and what they cost", *_curves(runs, drawn))
    if by_class := _figures(drawn, "classes"):
        yield _section("By class", by_class)
    if on_devices := _figures(drawn, "devices"):
        yield _section("On the devices", *filter(None, (device_table(runs), on_devices)), _note(DEVICES))
    yield _section("Federation", _federation(runs, drawn))
    if drops := _figures(drawn, "dropouts"):
        yield _section("Drop-outs", drops, *_dropouts(runs))
    yield _section("How bytes are counted", f"<p>{escape(BYTES)}</p>")
    yield _section("Configuration", *map(_configuration, runs))
    yield _section("Versions", _versions(runs))


def _section(title: str, *parts: str) -> str:
    body = "\n".join(parts)
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>"


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _notes(runs: Sequence[RunFolder], target: float | None) -> Iterator[str]:
    if target is not None:
        yield _note(
            f"The target is a test accuracy of {100 * target:.4g} %; what it took is read at the first evaluated round "
            "that reaches it. The default target is 90 % of the best accuracy any run reached, rounded down to a whole "
            "percent."
        )
    if held := [run.label for run in runs if run.judged_on == "validation"]:
        which = "All runs" if len(held) == len(runs) else ", ".join(held)
        yield _note(
            f"{which}: judged on a validation part held out of the training set. It stands in the place of the "
            "test set, and what is called test here is that part."
        )
    over = sorted({str(run.summary["final_rounds"]) for run in runs if "final_rounds" in run.summary}, key=len)
    mean = f", a mean over the last {' or '.join(over)} rounds" if over else ""
    yield _note(
        f"Final is as the run's summary states it{mean}; of an unfinished run, the last evaluated round. "
        "– means not reached or not recorded."
    )


def _figures(drawn: Drawn, section: Section) -> str:
    """The figures of one section, or nothing."""
    shown = [
        f"<figure>\n<figcaption>{escape(picture.caption)}</figcaption>\n"
        f"{inline(svg, picture.name, escape(picture.caption))}\n</figure>"
        for picture, svg in drawn
        if picture.section == section
    ]
    figures = "\n".join(shown)
    return f'<div class="figures">\n{figures}\n</div>' if shown else ""


def _curves(runs: Sequence[RunFolder], drawn: Drawn) -> Iterator[str]:
    yield _figures(drawn, "curves") or _note("No round has been evaluated yet.")
    if any(len(curve(run, "test_loss").y) > NOISY for run in runs):
        yield _note(f"More than {NOISY} points: thin as measured, thick a running mean of 5.")


def _federation(runs: Sequence[RunFolder], drawn: Drawn) -> str:
    """The heat maps, and which runs have none."""
    without = [run.label for run in runs if not any(run.clients.get("labels") or [])]
    parts = [_figures(drawn, "federation")]
    if without:
        parts.append(_note(f"No label counts (clients.json) for {', '.join(without)}."))
    return "\n".join(filter(None, parts))


def _dropouts(runs: Sequence[RunFolder]) -> Iterator[str]:
    listed, count = dropouts_table(runs)
    shown = f" (the first {MOST_DROPS}; all are in rounds.jsonl)" if count > MOST_DROPS else ""
    title = f"{count:,} dropped {'reply' if count == 1 else 'replies'}{shown}"
    yield f"<details>\n<summary>{escape(title)}</summary>\n{listed}\n</details>"


def _configuration(run: RunFolder) -> str:
    source = run.source.strip() or "config.toml is not there"
    return f"<details>\n<summary>{escape(run.label)}</summary>\n<pre>{escape(source)}</pre>\n</details>"


def _versions(runs: Sequence[RunFolder]) -> str:
    """Whatever the summaries say about the software, the machine and the model, and what drew this page."""
    stated = [_about(run.summary) for run in runs]
    keys = list(dict.fromkeys(key for about in stated for key in about))
    rows = [[run.label, *(about.get(key) for key in keys)] for run, about in zip(runs, stated, strict=True)]
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
