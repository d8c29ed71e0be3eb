"""Tables of the page, as HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import zip_longest

from fedge.report.dropouts import dropped
from fedge.report.groups import Group
from fedge.report.read import RunFolder
from fedge.report.series import last, telling_metrics
from fedge.report.summary import Cell, columns, hundred, summary_rows

NOTHING = "–"
MOST_DROPS = 50
SOME = re.compile(r" (\(\d+ of \d+\))$")


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]], words: int = 1, classes: Sequence[str] = ()) -> str:
    """An HTML table of escaped cells; the first `words` columns are text, the others numbers.

    `classes` are those of its rows, in safe words: a row of a filtered group is not shown.
    """
    top = "".join(_cell("th", cell, at < words) for at, cell in enumerate(head))
    body = "".join(
        f"<tr{mark}>{''.join(_cell('td', cell, at < words) for at, cell in enumerate(row))}</tr>\n"
        for row, mark in zip_longest(rows, (f' class="{one}"' for one in classes), fillvalue="")
    )
    return (
        f'<div class="wide" tabindex="0"><table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'
    )


def _cell(tag: str, text: Cell, is_text: bool) -> str:
    mark = "" if is_text else ' class="n"'
    shown = escape(NOTHING if text is None else text)
    if not is_text:  # how many runs have such a value, on a line of its own
        shown = SOME.sub(r" <small>\1</small>", shown)
    if tag == "th":  # a long name breaks at its parts
        shown = shown.replace("_", "_<wbr>")
    return f"<{tag}{mark}>{shown}</{tag}>"


def summary_table(groups: Sequence[Group], target: float | None, classes: Sequence[str] = ()) -> str:
    """One row per group: means over its runs, with their spread if there are several."""
    head, rows = summary_rows(groups, columns(target, telling_metrics([run for group in groups for run in group.runs])))
    return table(head, rows, classes=classes)


def device_table(runs: Sequence[RunFolder]) -> str:
    """Test accuracy by kind of device, at the last evaluated round; nothing if all devices are alike."""
    found = []
    for run in runs:
        devices, accuracy = run.clients.get("devices"), last(run, "test_class_accuracy")
        if not devices or not accuracy:
            continue
        for kind, count, labels in zip(devices["kinds"], devices["clients"], devices["labels"], strict=True):
            known = [(n, a) for n, a in zip(labels, accuracy, strict=True) if a is not None]
            total = sum(n for n, _ in known)
            share = hundred(sum(n * a for n, a in known) / total) if total else None
            found.append([f"{run.label}, failed" if run.failed else run.label, kind, str(count), share])
    return table(["algorithm", "devices", "clients", "test accuracy (%)"], found, words=2) if found else ""


def dropouts_table(runs: Sequence[RunFolder]) -> tuple[str, int]:
    """The first drop-outs, run by run, and how many there are in all."""
    rows = [
        [run.label, str(record.get("round", "")), *(_text(drop.get(key)) for key in keys)]
        for keys in [("client", "task", "reason")]
        for run in runs
        for record, drops in zip(run.rounds, dropped(run), strict=True)
        for drop in drops
    ]
    head = ["algorithm", "round", "client", "task", "reason"]
    return table(head, rows[:MOST_DROPS], words=len(head)), len(rows)


def _text(value: object) -> Cell:
    return None if value is None else str(value)
