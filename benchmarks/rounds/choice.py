"""Which setting of a method is chosen: by its held-out trials alone."""

from __future__ import annotations

from statistics import mean, median

from .grid import Grid, Problem, Setting
from .store import Line, Store


def rank(grid: Grid, lines: list[Line]) -> tuple[bool, float, float]:
    """Settings in order: fewest rounds to the held-out target first (median of the seeds), then the highest end."""
    target = grid.problems[lines[0]["problem"]].held_out
    at = median(first_at(line["accuracy"], target) for line in lines)
    ends = [mean(line["accuracy"][-grid.tuning["last"] :] or [0.0]) for line in lines]
    return any(line["diverged"] for line in lines), at, -mean(ends)


def first_at(curve: list[float], target: float) -> float:
    return next((i + 1 for i, value in enumerate(curve) if value >= target), float("inf"))


def ranked(grid: Grid, problem: Problem, store: Store, name: str) -> list[list[Line]]:
    """The trials of every setting in its last stage (one line per seed), best first."""
    last: dict[str, list[Line]] = {}
    for line in sorted(store.of("trial", problem.name, name), key=lambda line: (line["rounds"], line["seed"])):
        same = last.setdefault(str(line["setting"]), [])
        if same and same[0]["rounds"] < line["rounds"]:
            same.clear()
        same.append(line)
    return sorted(last.values(), key=lambda lines: (-lines[0]["rounds"], rank(grid, lines)))


def chosen(grid: Grid, problem: Problem, store: Store, name: str) -> Setting | None:
    """The setting that is trained with every seed; None before there are trials.

    A problem that is `like` another one has no trials of its own. It is about final accuracies: it takes the setting of
    the other one with the highest held-out accuracy at the end of the last stage.
    """
    trials = ranked(grid, grid.problems[problem.like] if problem.like else problem, store, name)
    if not trials:
        return None
    if problem.like:
        whole = [lines for lines in trials if lines[0]["rounds"] == trials[0][0]["rounds"]]
        trials = sorted(whole, key=lambda lines: (rank(grid, lines)[0], rank(grid, lines)[2]))
    found: Setting = trials[0][0]["setting"]
    return found
