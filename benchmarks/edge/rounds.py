"""Whole rounds of workload B (docs/speed.md) with a clock and without: what time and policies cost.

All ways take turns, a few rounds each, after rounds in which their steps are recorded; CPU time on one thread. Every
turn is compared with the turn of no clock that goes before it. A policy that leaves clients out, or has them do fewer
steps, trains less than no clock does: so the clock's own code is timed as well, the draw of a cohort included.

Rounds of workload A take seconds on a CPU, so of them the clock's own code alone is judged: nothing else could be told
from the machine's moods.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, cast

from torch import Tensor

from fedge.bench import WORKLOADS
from fedge.bench.timing import Round
from fedge.core import Algorithm, At
from fedge.edge import Choice, Clock, Deadline, FirstOf, PartialWork, Profiles
from fedge.engine import Simulator
from fedge.federation import Federation

PLAIN, TARGET, TARGET_A = "no clock", 20.0, 5.0  # % of a round
WARM, TURNS, EACH = 200, 15, 20  # rounds before anything is timed; turns, and rounds in each
WAYS: dict[str, dict[str, Any]] = {
    "wait for all": {},
    "FirstOf(15) of 20": {"policy": FirstOf(15)},
    "Deadline(0.12)": {"policy": Deadline(0.12)},
    "PartialWork(0.09)": {"policy": PartialWork(0.09)},
    "stay = 1": {"stay": 1.0},
    'Choice("speed")': {"choice": Choice("speed")},
    'Choice("labels")': {"choice": Choice("labels")},
}
WAYS_A: dict[str, dict[str, Any]] = {  # its rounds take phones 10 to 50 s
    "wait for all": {},
    "FirstOf(15) of 20": {"policy": FirstOf(15)},
    "Deadline(15)": {"policy": Deadline(15.0)},
    "PartialWork(15)": {"policy": PartialWork(15.0)},
    "stay = 60": {"stay": 60.0},
    'Choice("speed")': {"choice": Choice("speed")},
    'Choice("labels")': {"choice": Choice("labels")},
}
ROUNDS_A = 3


class Timed(Clock):
    """A clock that knows the CPU seconds of its own code."""

    own = 0.0

    def ask(self, *given: Any) -> Any:
        return self._timed(super().ask, given)

    def _carry(self, *given: Any) -> Any:
        begin = time.process_time()
        try:
            return super()._carry(*given)
        finally:
            self.own -= time.process_time() - begin

    def notes(self) -> dict[str, Any]:
        found: dict[str, Any] = self._timed(super().notes, ())
        return found

    def choosing(self, clients: int, size: int) -> Callable[[At], Tensor] | None:
        draw = super().choosing(clients, size)
        return None if draw is None else lambda at: cast(Tensor, self._timed(draw, (at,)))

    def _timed(self, work: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        begin = time.process_time()
        try:
            return work(*given)
        finally:
            self.own += time.process_time() - begin


class Side(Round):
    """Rounds one after another, with this clock or without one."""

    def __init__(self, options: dict[str, Any] | None, name: str = "B") -> None:
        workload = WORKLOADS[name]

        def link(algorithm: Algorithm[Any], federation: Federation, **engine: Any) -> Any:
            inner = Simulator(algorithm, federation, **engine)
            return inner if options is None else Timed(inner, federation, Profiles("phone", spread=10.0), **options)

        super().__init__(workload, "cpu", cast(Any, link))
        self.draw = self.link.choosing(100, workload.cohort) or self.draw

    def turn(self, rounds: int) -> tuple[float, float]:
        """Milliseconds of a round, and of the clock's own code in it."""
        before, begin = getattr(self.link, "own", 0.0), time.process_time()
        with self.working():
            for _ in range(rounds):
                self()
                self.link.notes()
        spent = time.process_time() - begin
        return 1e3 * spent / rounds, 1e3 * (getattr(self.link, "own", 0.0) - before) / rounds


def measured(warm: int = WARM, turns: int = TURNS, each: int = EACH) -> dict[str, Any]:
    """By way, one entry per turn: milliseconds of a round, of one with no clock just before, and of the clock."""
    plain, sides = Side(None), {name: Side(options) for name, options in WAYS.items()}
    for side in (plain, *sides.values()):
        side.turn(warm)
    found: dict[str, Any] = {name: {"round": [], PLAIN: [], "own": []} for name in WAYS}
    for _ in range(turns):
        for name, side in sides.items():
            without, (whole, own) = plain.turn(each)[0], side.turn(each)
            for key, value in (("round", whole), (PLAIN, without), ("own", own)):
                found[name][key].append(round(value, 3))
    return found


def measured_a(rounds: int = ROUNDS_A) -> dict[str, Any]:
    """By way, one entry per round of A after a first one: milliseconds, and those of the clock."""
    found: dict[str, Any] = {}
    for name, options in WAYS_A.items():
        side = Side(options, "A")
        side.turn(1)
        turns = [side.turn(1) for _ in range(rounds)]
        found[name] = {"round": [round(t[0], 1) for t in turns], "own": [round(t[1], 3) for t in turns]}
    return found


def share_a(some: dict[str, list[float]]) -> float:
    """The median over the rounds, in %: of the clock's code in the rest of its round."""
    return median(100 * own / (whole - own) for own, whole in zip(some["own"], some["round"], strict=True))


def shares(some: dict[str, list[float]]) -> tuple[float, float]:
    """Medians over the turns, in %: of the clock's code in the rest of its round, and by how much the round is longer
    than one with no clock."""
    own = median(100 * own / (whole - own) for own, whole in zip(some["own"], some["round"], strict=True))
    more = median(100 * (whole / plain - 1) for whole, plain in zip(some["round"], some[PLAIN], strict=True))
    return own, more


def meets(some: dict[str, list[float]]) -> bool:
    """Both shares are within the target."""
    return max(shares(some)) <= TARGET


def table(found: dict[str, Any]) -> list[list[str]]:
    head = ["", "ms per round", "no clock, ms", "longer by, %", "the clock's code, ms", "of the rest, %"]
    rows = [[*head, f"within {TARGET:.0f} %"]]
    for name, some in found.items():
        own, more = shares(some)
        ms = {key: f"{median(values):.2f}" for key, values in some.items()}
        numbers = [ms["round"], ms[PLAIN], f"{more:.1f}", ms["own"], f"{own:.1f}"]
        rows.append([name, *numbers, "met" if meets(some) else "**missed**"])
    return rows


def table_a(found: dict[str, Any]) -> list[list[str]]:
    rows = [["workload A", "ms per round", "the clock's code, ms", "of the rest, %", f"within {TARGET_A:.0f} %"]]
    for name, some in found.items():
        share = share_a(some)
        judged = "met" if share <= TARGET_A else "**missed**"
        rows.append([name, f"{median(some['round']):,.0f}", f"{median(some['own']):.2f}", f"{share:.3f}", judged])
    return rows
