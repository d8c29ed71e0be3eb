"""Every figure of a report, as pure functions from runs to matplotlib figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import quote

from matplotlib.figure import Figure

from fedge.report.curves import accuracy, headline, loss, metric
from fedge.report.dropouts import dropouts_figure, dropped
from fedge.report.groups import grouped
from fedge.report.heatmap import class_accuracy, partition_figure
from fedge.report.read import RunFolder
from fedge.report.series import Against, curve, is_asked_for, last, own_metrics
from fedge.report.timeline import timeline

__all__ = [
    "Picture",
    "accuracy",
    "class_accuracy",
    "dropouts_figure",
    "headline",
    "loss",
    "metric",
    "partition_figure",
    "pictures",
    "timeline",
]

MOST_FEDERATIONS = 4  # heat maps on a page
MOST_TIMELINES = 4
MOST_UNASKED = 8  # figures of metrics client by client, and of those that any regression has
Section = Literal["curves", "classes", "devices", "federation", "dropouts"]
WORDS: dict[Against, str] = {
    "rounds": "rounds",
    "MB": "communication",
    "seconds": "time",
    "virtual_seconds": "time on the devices",
    "joules": "energy",
}


class Picture(NamedTuple):
    """A figure, its file name without the ending, where it belongs, and what it shows."""

    name: str
    section: Section
    caption: str
    figure: Figure


def pictures(runs: Sequence[RunFolder], target: float | None = None) -> Iterator[Picture]:
    """What these runs have data for, in the order of the page."""
    yield from _curves(runs, target)
    if any(last(run, "test_class_accuracy") for run in runs):
        mean = ", mean over seeds" if len(grouped(runs)) < len(runs) else ""
        caption = f"Test accuracy by class, at the last evaluated round{mean}"
        yield Picture("class_accuracy", "classes", caption, class_accuracy(runs))
    yield from _timelines(runs)
    yield from _federations(runs)
    if any(drops for run in runs for drops in dropped(run)):
        yield Picture("dropouts", "dropouts", "Dropped replies per round", dropouts_figure(runs))


def _curves(runs: Sequence[RunFolder], target: float | None) -> Iterator[Picture]:
    against: Against
    for against in get_args(Against):
        words, name = WORDS[against], against.lower()
        if any(curve(run, "test_accuracy", against).y for run in runs):
            drawn = accuracy(runs, against, target)
            yield Picture(f"accuracy_{name}", "curves", f"Accuracy against {words}", drawn)
        if any(curve(run, "test_loss", against).y for run in runs):
            yield Picture(f"loss_{name}", "curves", f"Loss against {words}", loss(runs, against))
    for name in drawn_metrics(runs)[0]:
        yield Picture(f"metric_{file_name(name)}", "curves", f"{name} against rounds", metric(runs, name))


def drawn_metrics(runs: Sequence[RunFolder]) -> tuple[list[str], list[str]]:
    """The metrics with a figure each, and those without: all that were asked for, and the first few of the others."""
    every = own_metrics(runs)
    unasked = [name for name in every if not is_asked_for(name)]
    gone = unasked[MOST_UNASKED:]
    return [name for name in every if name not in gone], gone


def file_name(metric: str) -> str:
    """What the file of this metric's figure is called; unusual letters are written as their codes.

    >>> file_name("rmse"), file_name("client_f1/phone")
    ('rmse', 'client_f1-2Fphone')
    """
    return quote(metric, safe="").replace("%", "-")


def federations(runs: Sequence[RunFolder]) -> list[tuple[dict[str, Any], list[str]]]:
    """Who holds what, and the labels of the runs that share it."""
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for run in runs:
        known = next((labels for clients, labels in groups if clients == run.clients), None)
        if known is not None:
            known.append(run.label)
        elif any(run.clients.get("labels") or []):
            groups.append((run.clients, [run.label]))
    return groups


def listed(labels: Sequence[str], most: int = 6) -> str:
    """All of them, or the first few and how many more there are."""
    more = f" and {len(labels) - most} others" if len(labels) > most else ""
    return ", ".join(labels[:most]) + more


def with_timeline(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """The first run of every configuration whose rounds have a time line: those of other seeds look alike."""
    firsts = ([run for run in group.runs if last(run, "timeline")][:1] for group in grouped(runs))
    return [run for first in firsts for run in first]


def _timelines(runs: Sequence[RunFolder]) -> Iterator[Picture]:
    for number, run in enumerate(with_timeline(runs)[:MOST_TIMELINES], 1):
        name = "timeline" if number == 1 else f"timeline_{number}"
        at, drawn = timeline(run)
        yield Picture(name, "devices", f"Round {at} of {run.label}, client by client", drawn)


def _federations(runs: Sequence[RunFolder]) -> Iterator[Picture]:
    """One heat map for all runs that share a federation, of the first few federations."""
    groups = federations(runs)
    for number, (clients, labels) in enumerate(groups[:MOST_FEDERATIONS], 1):
        drawn = partition_figure(clients["labels"], clients.get("names") or (), clients.get("clients"))
        caption = "Examples by client and class"
        if len(groups) > 1:
            caption += f": {listed(labels)}"
        yield Picture("clients" if number == 1 else f"clients_{number}", "federation", caption, drawn)
