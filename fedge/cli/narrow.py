"""Tables that fit the terminal: columns that find no room are left out and named.

Metrics that nobody asked for go first, the user's own last, the labels never.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedge.cli.text import printable, say
from fedge.report.series import is_asked_for

LABEL = 22  # letters of a label that have room on one line
HOW_FAR = 12  # letters of what is said of rounds, where it is more than a number
GAP = 2  # columns of the terminal between two of the table
WORDS = ("algorithm", "rounds")
SPARE = (
    "time\ns",
    "best\nacc %",
    "best\nloss",
    "MB\ndown",
    "MB\nup",
    "energy\nJ",
    "device\ns",
)  # go without these in this order


def title_of(metric: str) -> str:
    return f"final\n{metric}"


def show(
    console: Console, head: Sequence[str], rows: Sequence[Sequence[str]], metrics: Sequence[str], all_: str
) -> None:
    """Print the table with the columns that fit, and say which did not, and where they are.

    Its words may come from a folder of somebody else.
    """
    head, rows = _printable(head), [_printable(row) for row in rows]
    metrics = [printable(name) for name in metrics]
    out = left_out(head, rows, metrics, console.width)
    console.print(_table(head, rows, out, console.width))
    if out:
        named = [" ".join(title.split()) for title in head if title in out]
        say(console, f"no room for {', '.join(named)}: {all_}")


def _printable(texts: Sequence[str]) -> list[str]:
    return ["\n".join(map(printable, text.split("\n"))) for text in texts]


def left_out(head: Sequence[str], rows: Sequence[Sequence[str]], metrics: Sequence[str], room: int) -> list[str]:
    """The titles without whose columns the table fits: metrics that nobody asked for, then SPARE, then the others.

    Label, runs, rounds and the first result stay: where they have no room, the label and the words are broken.
    """
    unasked = [title_of(name) for name in metrics if not is_asked_for(name)]
    asked = [title_of(name) for name in metrics if is_asked_for(name)]
    gone, widths = list[str](), _widths(head, rows)
    first = next((at for at, title in enumerate(head) if title not in (*WORDS, "runs")), 0)
    rest = [title for title in reversed(head[first + 1 :]) if title not in (*SPARE, *asked, *unasked)]
    for title in (*reversed(unasked), *SPARE, *reversed(asked), *rest):
        if _needed(widths, head[0], gone) <= room:
            break
        gone += [title] if title in head else []
    return gone


def _widths(head: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, int]:
    return {texts[0]: _width(texts) + GAP for texts in zip(head, *rows, strict=True)}


def _needed(widths: dict[str, int], label: str, without: Sequence[str]) -> int:
    """Columns of the terminal, where a long label and words about rounds may be broken."""
    least = {label: LABEL + GAP, WORDS[1]: HOW_FAR + GAP}
    kept = {title: min(width, least.get(title, width)) for title, width in widths.items() if title not in without}
    return sum(kept.values()) - GAP


def _width(texts: Sequence[str]) -> int:
    return max(len(line) for text in texts for line in text.split("\n"))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], without: Sequence[str], room: int) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    kept = [at for at, title in enumerate(head) if title not in without]
    widths = {title: width - GAP for title, width in _widths(head, rows).items() if title not in without}
    if sum(widths.values()) + GAP * (len(kept) - 1) > room:
        widths[WORDS[1]] = min(HOW_FAR, widths.get(WORDS[1], 0))
        others = sum(width + GAP for title, width in widths.items() if title in head and title != head[0])
        widths[head[0]] = max(min(LABEL, widths[head[0]]), min(widths[head[0]], room - others))
    for at in kept:
        words = head[at] in WORDS and (at == 0 or any(not row[at].isdigit() for row in rows))
        options: dict[str, Any] = {"justify": "left" if words else "right", "no_wrap": not words}
        shown.add_column(escape(head[at]), overflow="fold", width=widths[head[at]] if words else None, **options)
    for row in rows:
        shown.add_row(*(escape(row[at]) for at in kept))
    return shown
