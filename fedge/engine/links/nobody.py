"""What a phase without answers is: cohorts that are drawn client by client may be empty."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedge import tree
from fedge.core import Ask, At, Payload, Reply
from fedge.engine.links.base_link import Around, BaseLink, Replies, begins_anew, named
from fedge.engine.uploads import checks


class NobodyDrawn(Exception):
    """The cohort of a round is empty, and its algorithm has no use for that."""


class TooFewDrawn(checks.TooFewReplies):
    """Fewer clients were drawn than have to answer: nobody is asked, and the round is skipped."""


class Nobody(Around):
    """A link that also answers for nobody: zeros of the right names and shapes, to asks whose rule `bounds` clients.

    Any other ask of an empty cohort raises `NobodyDrawn`: there is nothing to average, and the round is skipped. So it
    answers for a cohort whose answers are all lost or bad, a few rounds in a row: what a private run releases must not
    tell whether it was so. For the same reason no checkpoint says how many rounds that were; a resumed run counts anew.
    """

    def __init__(self, inner: BaseLink) -> None:
        super().__init__(inner)
        self.tasks = inner.algorithm.tasks(inner.runtime.handle)
        self._known: Payload = {}  # one row's worth of what the cohort holds
        self._lost = set[int]()  # rounds since the last good answer, in which all that came was bad

    @torch.no_grad()
    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Replies:
        if begins_anew(at, asks):
            self._known = {}
        if not len(clients) and not all(ask.combine.bounds for ask in asks):
            raise NobodyDrawn
        zeros = [self._zeros(ask) if ask.combine.bounds else None for ask in asks]
        replies, dropped = self._asked(at, asks, clients)
        filled = [
            one if one.mean or zero is None else replace(zero, key=one.key)
            for one, zero in zip(replies, zeros, strict=True)
        ]
        return filled, dropped

    def _asked(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Replies:
        """The inner link's replies; those of nobody if there is nobody, or nobody whose answer counts."""
        nothing = [Reply({}, torch.zeros((), dtype=torch.long)) for _ in asks]
        if not len(clients):
            return nothing, []
        try:
            self._check_drawn(len(clients))
            found = self.inner.ask(at, asks, clients)
        except checks.TooFewReplies as end:
            self._lost |= {at.round}
            bounded = all(ask.combine.bounds for ask in asks)
            if not bounded or not end.dropped or len(self._lost) >= checks.IN_A_ROW:
                raise
            self.inner.abandon(at.round, at.phase)  # nothing of this phase is in what is released
            return nothing, end.dropped
        self._lost = set()
        return found

    def _check_drawn(self, clients: int) -> None:
        needed = self.inner.min_replies
        if clients < needed:
            raise TooFewDrawn(
                f"{clients} clients were drawn, {needed} have to answer: raise cohort or lower min_replies"
            )

    def _zeros(self, ask: Ask) -> Reply:
        """What the mean of no uploads is."""
        tasks = named(self.tasks, ask)
        rows = None if tasks[0].rows is None else len(ask.rows or range(tasks[0].rows))
        self._known |= {n: p if rows is None else tree.take(p, 0) for n, p in ask.send.items()}
        checks.require_held(ask.tasks[0], ask.reuse, self._known)
        mean: Payload = {}
        for task in tasks:
            whole = checks.template(task, self._known)
            if not task.private:
                mean |= {name: part for name, part in whole.items() if name not in task.remembers}
            self._known |= {name: whole[name] for name in task.keeps}
        front = () if rows is None else (rows,)
        zeros = {
            name: tree.map_(lambda leaf: leaf.new_zeros((*front, *leaf.shape)), part) for name, part in mean.items()
        }
        return Reply(zeros, torch.zeros(front, dtype=torch.long))
