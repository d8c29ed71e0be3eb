"""Nodes that let a deadline pass: how long they are left alone."""

from __future__ import annotations

LONGEST = 31  # rounds at most that go by before a node is asked again
STEADY = 3  # answers in a row after which earlier silence is forgotten


class Silence:
    """A node that was silent once is asked who it is before the next round, which waits a moment for the answer.

    One that is silent again when it is given work is left alone: for 1, 3, 7, ... rounds, until it does its work three
    times in a row. A node that answers and is silent in turn, or leaves and comes back, would else cost a deadline in
    every second round.
    """

    def __init__(self) -> None:
        self._fresh: set[int] = set()  # silent for the first time, and not asked since
        self._times: dict[int, int] = {}  # node -> deadlines that it let pass since it was last steady
        self._steady: dict[int, int] = {}  # node -> answers since its last silence
        self._rest: dict[int, int] = {}  # node -> rounds that go by before it is asked again

    def note(self, node: int) -> str:
        """It was silent: what happens now, in words."""
        times = self._times[node] = self._times.get(node, 0) + 1
        self._steady.pop(node, None)
        if times == 1:
            self._fresh.add(node)
            return "it is asked again who it is"
        rest = self._rest[node] = min(LONGEST, 2 ** (times - 1) - 1)
        return f"silent {times} times, it is asked again after {rest} round{'s' * (rest > 1)}"

    def answered(self, node: int) -> None:
        """It did its work in time."""
        if node in self._times:
            self._steady[node] = self._steady.get(node, 0) + 1
            if self._steady[node] >= STEADY:
                del self._times[node], self._steady[node]

    def resting(self) -> set[int]:
        return set(self._rest)

    def fresh(self) -> set[int]:
        """Those to wait for a moment; each is in here once."""
        found, self._fresh = self._fresh, set()
        return found

    def round(self) -> None:
        """A round begins."""
        self._rest = {node: rounds - 1 for node, rounds in self._rest.items() if rounds > 1}

    def wake(self) -> None:
        """Everybody is needed."""
        self._rest = {}

    def leave(self, online: set[int]) -> None:
        """Who was away is asked when it is back, unless it was silent three times; that is not forgotten."""
        self._fresh &= online
        self._rest = {node: rest for node, rest in self._rest.items() if node in online or self._times[node] > 2}
