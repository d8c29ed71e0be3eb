"""What a phase without answers is: cohorts that are drawn client by client may be empty."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedge import tree
from fedge.core import Ask, At, Drop, Payload, Reply
from fedge.engine.links.base_link import Around, BaseLink, Replies, begins_anew, named
from fedge.engine.uploads import checks


class NobodyDrawn(Exception):
    """The cohort of a round is empty, and its algorithm has no use for that."""


class Nobody(Around):
    """A link that also answers for nobody: zeros of the right names and shapes, to asks whose rule `bounds` clients.

    Any other ask of an empty cohort raises `NobodyDrawn`: there is nothing to average, and the round is skipped.
    """

    def __init__(self, inner: BaseLink) -> None:
        super().__init__(inner)
        self.tasks = inner.algorithm.tasks(inner.runtime.handle)
        self._known: Payload = {}  # one row's worth of what the cohort holds

    @torch.no_grad()
    def ask(self, at: At, asks: tuple[Ask, ...], clients: Tensor) -> Replies:
        if begins_anew(at, asks):
            self._known = {}
        if not len(clients) and not all(ask.combine.bounds for ask in asks):
            raise NobodyDrawn
        zeros = [self._zeros(ask) if ask.combine.bounds else None for ask in asks]
        nothing: Replies = [Reply({}, torch.zeros((), dtype=torch.long)) for _ in asks], list[Drop]()
        replies, dropped = self.inner.ask(at, asks, clients) if len(clients) else nothing
        filled = [
            one if one.mean or zero is None else replace(zero, key=one.key)
            for one, zero in zip(replies, zeros, strict=True)
        ]
        return filled, dropped

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
