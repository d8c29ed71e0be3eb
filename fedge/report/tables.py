"""Tables of the page: columns are functions of a run, and a column nobody fills is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Literal

from fedge.report.dropouts import dropped
from fedge.report.read import RunFolder
from fedge.report.series import (
    best_accuracy,
    curve,
    elapsed,
    is_number,
    last,
    megabytes,
    recorded,
    to_target,
)

Cell = str | None
Column = tuple[str, Callable[[RunFolder], Cell]]
NOTHING = "–"
MOST_DROPS = 50


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]], words: int = 1) -> str:
    """An HTML table of escaped cells; the first `words` columns are text, the others numbers."""
    top = "".join(_cell("th", cell, at < words) for at, cell in enumerate(head))
    body = "".join(
        f"<tr>{''.join(_cell('td', cell, at < words) for at, cell in enumerate(row))}</tr>\n" for row in rows
    )
    return f'<div class="wide"><table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'


def _cell(tag: str, text: Cell, is_text: bool) -> str:
    mark = "" if is_text else ' class="n"'
    return f"<{tag}{mark}>{escape(NOTHING if text is None else text)}</{tag}>"


def summary_table(runs: Sequence[RunFolder], target: float | None) -> str:
    columns = _columns(target)
    cells = [[value(run) for _, value in columns] for run in runs]
    filled = [at for at in range(len(columns)) if any(row[at] is not None for row in cells)]
    return table([columns[at][0] for at in filled], [[row[at] for at in filled] for row in cells])


def _columns(target: float | None) -> list[Column]:
    columns: list[Column] = [
        ("algorithm", lambda run: run.label),
        ("rounds", _rounds),
        ("final test accuracy (%)", lambda run: percent(_stated(run, "final_accuracy", last(run, "test_accuracy")))),
        ("best test accuracy (%)", lambda run: percent(_stated(run, "best_accuracy", best_accuracy(run)))),
        (
            "final train accuracy (%)",
            lambda run: percent(_stated(run, "final_train_accuracy", last(run, "train_accuracy"))),
        ),
        ("final test loss", _loss),
        ("epsilon, at delta", _privacy),
        ("MB up", lambda run: number(megabytes(run, "up"))),
        ("MB down", lambda run: number(megabytes(run, "down"))),
        ("MB in total", lambda run: number(megabytes(run, "up") + megabytes(run, "down"))),
        ("seconds", lambda run: seconds((elapsed(run, "seconds") or [0.0])[-1])),
        ("seconds on the devices", lambda run: _spent(run, "virtual_seconds")),
        ("joules", lambda run: _spent(run, "joules")),
    ]
    return columns if target is None else columns + _target_columns(target)


def _target_columns(target: float) -> list[Column]:
    def taken(run: RunFolder, at: int, text: Callable[[float], str] = number) -> Cell:
        found = to_target(run, target)
        value = None if found is None else found[at]
        return None if value is None else text(value)

    goal = f"to {100 * target:.4g}\u00a0%"
    return [
        (f"rounds {goal}", lambda run: taken(run, 0)),
        (f"MB {goal}", lambda run: taken(run, 1)),
        (f"seconds {goal}", lambda run: taken(run, 2, seconds)),
        (f"seconds on the devices {goal}", lambda run: taken(run, 3)),
        (f"joules {goal}", lambda run: taken(run, 4)),
    ]


def _spent(run: RunFolder, what: Literal["virtual_seconds", "joules"]) -> Cell:
    return number(elapsed(run, what)[-1]) if run.rounds and recorded(run, what) else None


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
            found.append(
                [run.label, kind, str(count), percent(sum(n * a for n, a in known) / total) if total else None]
            )
    return table(["algorithm", "devices", "clients", "test accuracy (%)"], found, words=2) if found else ""


def _rounds(run: RunFolder) -> str:
    if run.finished:
        return str(len(run.rounds))
    train = run.config.get("train")
    planned = train.get("rounds") if isinstance(train, dict) else None
    return f"{len(run.rounds)} of {planned or '?'}, unfinished"


def _stated(run: RunFolder, key: str, otherwise: object) -> object:
    """What the summary says; an unfinished run has none."""
    stated = run.summary.get(key)
    return otherwise if stated is None else stated


def _loss(run: RunFolder) -> Cell:
    """Of runs without an accuracy, which have nothing else to show."""
    loss = _stated(run, "final_loss", last(run, "test_loss"))
    return f"{loss:.4g}" if is_number(loss) and not curve(run, "test_accuracy").y else None


def _privacy(run: RunFolder) -> Cell:
    """What a private run has spent; the sign of infinity where its noise is none."""
    epsilon, delta = last(run, "epsilon"), last(run, "delta")
    if not is_number(delta):
        return None
    return f"{epsilon:.3g} at {delta:.1e}" if is_number(epsilon) else "∞: no noise"


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


def percent(fraction: object) -> Cell:
    return f"{100 * fraction:.1f}" if is_number(fraction) else None


def seconds(value: float) -> str:
    """One digit after the point, as `fedge run` prints them: 0.4, 12.3, 12,345.0."""
    return f"{value:,.1f}"


def number(value: float) -> str:
    """Three digits or all before the point: 0.0123, 1.23, 12.3, 123, 12,345."""
    if value == int(value) or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 1 else f"{value:.{2 if value < 10 else 1}f}"
