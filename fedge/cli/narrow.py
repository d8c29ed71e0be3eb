"""Tables that fit the terminal: metrics that find no room are left out and named, the labels never."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedge.cli.text import say

LABEL = 22  # letters of a label that have room on one line
GAP = 2  # columns of the terminal between two of the table
WORDS = ("algorithm", "rounds")


def title_of(metric: str) -> str:
    return f"final\n{metric}"


def show(
    console: Console, head: Sequence[str], rows: Sequence[Sequence[str]], metrics: Sequence[str], all_: str
) -> None:
    """Print the table; of the metrics as many as fit, and where all of them are."""
    own = [name for name in metrics if title_of(name) in head]
    out = left_out(head, rows, own, console.width)
    console.print(_table(head, rows, [title_of(name) for name in out]))
    if out:
        say(console, f"no room for {', '.join(out)}: {all_}")


def left_out(head: Sequence[str], rows: Sequence[Sequence[str]], metrics: Sequence[str], room: int) -> list[str]:
    """The metrics, from the last one on, without whose columns the table fits."""
    widths = {texts[0]: _width(texts) + GAP for texts in zip(head, *rows, strict=True)}
    needed = sum(widths.values()) - GAP - max(0, widths[head[0]] - GAP - LABEL)
    kept = len(metrics)
    while kept and needed > room:
        kept -= 1
        needed -= widths[title_of(metrics[kept])]
    return list(metrics[kept:])


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
