"""Small pieces of text that several commands share."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

from rich.console import Console
from rich.markup import escape


def examples(*lines: str) -> str:
    """The end of a help page."""
    shown = "\n\n".join(f"  [cyan]{escape(line)}[/cyan]" for line in lines)
    return f"[bold]Examples[/bold]\n\n{shown}"


def listen() -> None:
    """fedge's log, its remarks too, as plain lines on stderr."""
    log = logging.getLogger("fedge")
    log.setLevel(logging.INFO)
    if not log.handlers:
        log.addHandler(logging.StreamHandler())


def say(console: Console, line: str) -> None:
    """A line as it is: paths must not be wrapped."""
    console.print(line, soft_wrap=True, markup=False, highlight=False)


def printable(text: str) -> str:
    """A text of somebody's file, without what a terminal would act on."""
    return "".join(one if one.isprintable() else " " for one in text)


def percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.1f}"


def standing(accuracy: float | None, loss: float | None, word: str = "") -> str:
    """How good a run is: `91.3 %`, or `loss 0.147` where there is no accuracy; nothing before it was evaluated."""
    if accuracy is not None:
        return f"{word}{percent(accuracy)} %"
    return "" if loss is None else f"loss {loss:.4g}"


def megabytes(amount: float) -> str:
    return f"{amount:.1f}" if amount < 1000 else f"{amount:,.0f}"


def short(value: float) -> str:
    """Three digits, or all before the point: 0.0123, 12.3, 12,345."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def pace(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms/round"
    return f"{seconds:.2g} s/round" if seconds < 10 else f"{seconds:.0f} s/round"


def duration(seconds: float) -> str:
    """0:07, 12:34 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def to_json(value: Any) -> str:
    """JSON that every reader takes: a number that is not finite becomes null."""
    return json.dumps(_finite(value), indent=2, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
