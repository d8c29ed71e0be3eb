"""Tables that fit the terminal: columns that find no room are left out and named.

Metrics that nobody asked for go first, the user's own last, the labels never.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedge.cli.text import say
from fedge.report.series import is_asked_for

LABEL = 22  # letters of a label that have room on one line
GAP = 2  # columns of the terminal between two of the table
WORDS = ("algorithm", "rounds")
SPARE = (
    "time\ns",
    "best\nacc %",
    "best\nloss",
    "MB\ndown",
    "MB\nup",
)  # go without these in this order


def title_of(metric: str) -> str:
    return f"final\n{metric}"


def show(
    console: Console, head: Sequence[str], rows: Sequence[Sequence[str]], metrics: Sequence[str], all_: str
) -> None:
    """Print the table with the columns that fit, and say which did not, and where they are."""
    out = left_out(head, rows, metrics, console.width)
    console.print(_table(head, rows, out))
    if out:
        named = [" ".join(title.split()) for title in head if title in out]
        say(console, f"no room for {', '.join(named)}: {all_}")


def left_out(head: Sequence[str], rows: Sequence[Sequence[str]], metrics: Sequence[str], room: int) -> list[str]:
    """The titles without whose columns the table fits: metrics that nobody asked for, then SPARE, then the others."""
    unasked = [title_of(name) for name in metrics if not is_asked_for(name)]
    asked = [title_of(name) for name in metrics if is_asked_for(name)]
    gone, widths = list[str](), _widths(head, rows)
    for title in (*reversed(unasked), *SPARE, *reversed(asked)):
        if _needed(widths, head[0], gone) <= room:
            break
        gone += [title] if title in head else []
    return gone


def _widths(head: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, int]:
    return {texts[0]: _width(texts) + GAP for texts in zip(head, *rows, strict=True)}


def _needed(widths: dict[str, int], label: str, without: Sequence[str]) -> int:
    """Columns of the terminal, where a long label may be broken."""
    kept = sum(width for title, width in widths.items() if title not in without)
    return kept - GAP - max(0, widths[label] - GAP - LABEL)


def _width(texts: Sequence[str]) -> int:
    return max(len(line) for text in texts for line in text.split("\n"))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], without: Sequence[str]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    kept = [at for at, title in enumerate(head) if title not in without]
    for at in kept:
        words = head[at] in WORDS and (at == 0 or any(not row[at].isdigit() for row in rows))
        least = min(LABEL, _width([head[0], *(row[0] for row in rows)])) if at == 0 else None
        side = "left" if words else "right"
        shown.add_column(escape(head[at]), justify=side, overflow="fold", no_wrap=not words, min_width=least)  # type: ignore[arg-type]
    for row in rows:
        shown.add_row(*(escape(row[at]) for at in kept))
    return shown
