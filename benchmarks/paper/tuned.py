"""What the page says of tuning: what was chosen, how often early leaders lost, which runs fell."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fedge.reproduce import DATASETS, EXPERIMENTS, Choices, Store, jobs
from fedge.reproduce.places import TUNE, paper
from fedge.reproduce.store import Line, collapsed
from fedge.reproduce.tables import NOT_RUN, markdown, step_of, title
from fedge.reproduce.tuning import grid, scope

SETTLED, DIP = 50, 0.9  # rounds after which a run that falls below this part of its best so far is remarked on


def tuning(choices: Choices) -> str:
    rows = []
    methods = dict.fromkeys(job.method for name in EXPERIMENTS for job in jobs(name, "fmnist", [0]))
    for method in methods:
        if not any((dataset, method) in choices.lines for dataset in DATASETS):
            continue
        tried = {axis: list(dict.fromkeys(one[axis] for one in grid(method))) for axis in grid(method)[0]}
        shown = "; ".join(f"{axis} {', '.join(f'{value:g}' for value in values)}" for axis, values in tried.items())
        rows.append([method, shown, *(_chosen(choices, dataset, method) for dataset in DATASETS)])
    alone = {dataset: [job for job in jobs(TUNE, dataset, [0]) if scope(job.cell) != dataset] for dataset in DATASETS}
    for row in zip(*alone.values(), strict=True):
        cells = [f"{title(job.cell)}: {_chosen(choices, job.cell, job.method)}" for job in row]
        rows.append([f"{row[0].method}, many clients", "the same", *cells])
    return markdown(["method", "grid", *(f"chosen, {paper()['datasets'][one]}" for one in DATASETS)], rows)


def leaders(choices: Choices) -> str:
    """How often the leader of an earlier stage was not what was chosen in the end."""
    lost = Counter[int]()
    for line in choices.lines.values():
        best: dict[int, Any] = {}
        for trial in sorted(line["trials"], key=lambda one: one["validation"]):
            best[trial["rounds"]] = trial["setting"]
        lost.update(rounds for rounds, setting in best.items() if setting != line["setting"])
    said = [f"the leader after {rounds} rounds was not chosen in {count}" for rounds, count in sorted(lost.items())]
    return f"of {len(choices.lines)} tunings, " + ", ".join(said)


def falls(store: Store) -> str:
    """The runs that collapsed: which, and from which round on they were below half of their best."""
    found = []
    for line in filter(collapsed, store.lines):
        seen = [value for value in line["test_accuracy"] if value is not None]
        low = [value is None or value < max(seen) / 2 for value in line["test_accuracy"]]
        since = len(low) - next((i for i, one in enumerate(reversed(low)) if not one), len(low)) + 1
        what = (
            f"below half of its best ({100 * max(seen):.1f} %) from round {since} on, {100 * seen[-1]:.1f} % at the end"
        )
        found.append(f"- {_who(line)}: {what}")
    return "\n".join(found) or "- none so far"


def dips(store: Store) -> str:
    """The runs that fell late and did not stay there: from what, to what, when, and where they ended."""
    found = []
    for line in store.lines:
        seen = [(number, value) for number, value in enumerate(line["test_accuracy"], 1) if value is not None]
        best, worst = 0.0, (DIP, 0, 0.0)  # the part that is left of the best so far, the round, that best
        for number, value in seen:
            if number > SETTLED and value < worst[0] * best:
                worst = value / best, number, best
            best = max(best, value)
        left, at, of = worst
        if at and not collapsed(line):
            fall = f"from {100 * of:.1f} to {100 * left * of:.1f} % by round {at}"
            found.append(f"- {_who(line)}: {fall}, {100 * seen[-1][1]:.1f} % at the end")
    return "\n".join(found) or "- none so far"


def _who(line: Line) -> str:
    step = step_of(line["config"]["algorithm"])
    return f"{line['experiment']} {line['cell']}, {line['label']}, {step}, seed {line['seed']}"


def _chosen(choices: Choices, scope: str, method: str) -> str:
    found = choices.lines.get((scope, method))
    if found is None:
        return NOT_RUN
    best = max(trial["validation"] for trial in found["trials"] if trial["rounds"] == found["rounds"])
    earlier = any(trial["setting"] not in grid(method) for trial in found["trials"])
    rounds = ", ".join(str(one) for one in sorted({trial["rounds"] for trial in found["trials"]}))
    note = f", of an earlier grid, {rounds} rounds" if earlier else ""
    return ", ".join(f"{name} {value:g}" for name, value in found["setting"].items()) + f" ({100 * best:.1f} %{note})"
