"""What the page says of tuning: what was chosen, how often early leaders lost, which runs fell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from textwrap import fill
from typing import Any

from fedge.sweep import Choices, Store
from fedge.sweep.entries import step_of
from fedge.sweep.files import TUNE, scope
from fedge.sweep.store import Line, collapsed

from .places import DATASETS, EXPERIMENTS, entries, grid, paper
from .tables import NOT_RUN, markdown, title

LONG = 120  # rounds of a tuning's last stage, unless the table says otherwise
SETTLED, DIP = 50, 0.9  # rounds after which a run that falls below this part of its best so far is remarked on


def tuning(choices: Choices) -> str:
    rows = []
    methods = dict.fromkeys(
        entry.method for data in DATASETS for name in EXPERIMENTS for entry in entries(name, data, [0])
    )
    for method in methods:
        if not any((dataset, method) in choices.lines for dataset in DATASETS):
            continue
        tried = {axis: list(dict.fromkeys(one[axis] for one in grid(method))) for axis in grid(method)[0]}
        shown = "; ".join(f"{axis} {', '.join(f'{value:g}' for value in values)}" for axis, values in tried.items())
        rows.append([method, shown, *(_chosen(choices, dataset, method) for dataset in DATASETS)])
    alone = {
        dataset: [entry for entry in entries(TUNE, dataset, [0]) if scope(entry.cell) != dataset]
        for dataset in DATASETS
    }
    for row in zip(*alone.values(), strict=True):
        cells = [f"{title(entry.cell)}: {_chosen(choices, entry.cell, entry.method)}" for entry in row]
        rows.append([f"{row[0].method}, many clients", "the same", *cells])
    return markdown(["method", "grid", *(f"chosen, {paper()['datasets'][one]}" for one in DATASETS)], rows)


def leaders(choices: Choices) -> str:
    """How often the leader of an earlier stage was not what was chosen in the end."""
    lost, held = Counter[int](), Counter[int]()
    for line in choices.lines.values():
        best: dict[int, Any] = {}
        for trial in sorted(line["trials"], key=lambda one: one["validation"]):
            best[trial["rounds"]] = trial["setting"]
        held.update(list(best))
        lost.update(rounds for rounds, setting in best.items() if setting != line["setting"])
    said = [f"after {rounds} rounds in {count} of {held[rounds]} tunings" for rounds, count in sorted(lost.items())]
    return fill(f"The leader of an earlier stage was not chosen in the end: {', '.join(said)}.", 120)


def falls(store: Store) -> str:
    """The runs that failed or collapsed: which, why, or from which round on they were below half of their best."""
    found = []
    for line in _in_order(store):
        if line["failed"]:
            found.append(f"- {_who(line)}: {line['failed']}")
        elif collapsed(line):
            seen = [value for value in line["test_accuracy"] if value is not None]
            low = [value is None or value < max(seen) / 2 for value in line["test_accuracy"]]
            since = len(low) - next((i for i, one in enumerate(reversed(low)) if not one), len(low)) + 1
            what = f"below half of its best ({100 * max(seen):.1f} %) from round {since} on"
            found.append(f"- {_who(line)}: {what}, {100 * seen[-1]:.1f} % at the end")
    return "\n".join(found) or "- none so far"


def dips(store: Store) -> str:
    """The other runs that fell late: from what, to what, when, and where they ended."""
    found = []
    for line in _in_order(store):
        fall = None if line["failed"] or collapsed(line) else _deepest(line["test_accuracy"])
        if fall is not None:
            at, best, value = fall
            last = [one for one in line["test_accuracy"] if one is not None][-1]
            what = f"from {100 * best:.1f} to {100 * value:.1f} % by round {at}, {100 * last:.1f} % at the end"
            found.append(f"- {_who(line)}: {what}")
    return "\n".join(found) or "- none so far"


def _deepest(series: Sequence[float | None]) -> tuple[int, float, float] | None:
    """The largest fall after round `SETTLED` to below `DIP` of the best so far: its round, that best, the value."""
    best, found = 0.0, None
    for number, value in enumerate(series, 1):
        if value is None:
            continue
        far = found is None or best - value > found[1] - found[2]
        if number > SETTLED and value < DIP * best and far:
            found = number, best, value
        best = max(best, value)
    return found


def _in_order(store: Store) -> list[Line]:
    return sorted(store.lines, key=lambda line: (line["experiment"], line["cell"], line["label"], line["seed"]))


def _who(line: Line) -> str:
    step = step_of(line["config"]["algorithm"])
    return f"{line['experiment']} {line['cell']}, {line['label']}, {step}, seed {line['seed']}"


def _chosen(choices: Choices, scope: str, method: str) -> str:
    found = choices.lines.get((scope, method))
    if found is None:
        return NOT_RUN
    last = sorted(trial["validation"] for trial in found["trials"] if trial["rounds"] == found["rounds"])
    best = last[-1]
    note = f", next {100 * last[-2]:.1f}" if len(last) > 1 else ""
    earlier = any(trial["setting"] not in grid(method) for trial in found["trials"])
    rounds = ", ".join(str(one) for one in sorted({trial["rounds"] for trial in found["trials"]}))
    note += f", of an earlier grid, {rounds} rounds" if earlier else ""
    short = found["rounds"] < LONG and not earlier
    count = len({str(trial["setting"]) for trial in found["trials"]})
    note += f"; {count} settings, {rounds} rounds" if short else ""
    shown = [f"{name} {value:g}{_edge(found['trials'], name, value)}" for name, value in found["setting"].items()]
    return ", ".join(shown) + f" ({100 * best:.1f} %{note})"


def _edge(trials: list[dict[str, Any]], axis: str, value: float) -> str:
    """A star on the smallest and the largest of three or more values that were tried: what is beyond may be better."""
    tried = {trial["setting"].get(axis, value) for trial in trials}
    return "\\*" if len(tried) > 2 and value in (min(tried), max(tried)) else ""
