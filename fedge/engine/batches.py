"""Batches are drawn by address: client, epoch and step say which examples, whoever computes them.

In epoch e a client visits its n examples in the order of the 40-bit keys fold(key, ORDER, e, i), ties by position, and
cuts that order into ceil(n / B) batches. `one_client` is the definition; `Schedule` draws the same for many at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedge.core import At, Batch, Task
from fedge.keys import CLIENT, ORDER, STEP, fold, fold_tensor

_BLOCK = 1 << 20  # indices drawn ahead of the steps that use them


def client_key(at: At, client: int) -> int:
    """The key of one client's work in a phase; tasks that run one after another there see the same batches."""
    return fold(at.seed, CLIENT, at.round, at.phase, client)


def client_keys(at: At, clients: Tensor) -> Tensor:
    return fold_tensor(fold(at.seed, CLIENT, at.round, at.phase), clients)


def _sort_key(key: int | Tensor, epoch: int | Tensor, position: Tensor) -> Tensor:
    return (fold_tensor(key, ORDER, epoch, position) >> 24) & ((1 << 40) - 1)


def one_client(task: Task, x: Tensor, y: Tensor, key: int) -> Iterator[Batch]:
    """The batches of one client, nothing padded."""
    n = len(y)
    position = torch.arange(n, device=y.device)
    step, steps = 0, task.steps(n)
    for epoch in range(task.epochs):
        order = _sort_key(key, epoch, position).argsort(stable=True)
        for chosen in order.split(min(task.batch_size or n, n)):
            if step == steps:
                return
            address = torch.tensor(fold(key, STEP, step), device=y.device)
            yield Batch(x[chosen], y[chosen], torch.ones_like(chosen, dtype=torch.bool), address)
            step += 1


class Schedule:
    """The batches of many jobs, step by step; jobs are sorted so that those still at work come first.

    `slots` says which of the clients each job belongs to (several jobs of one client see the same batches).
    """

    def __init__(self, task: Task, examples: Tensor, sizes: Tensor, keys: Tensor, slots: Tensor) -> None:
        device = examples.device
        self.width = int(min(task.batch_size or int(sizes.max()), int(sizes.max())))
        steps = torch.tensor([task.steps(n) for n in sizes.tolist()])
        self.steps = steps[slots].tolist()  # [J], descending
        a_pass = -(-sizes // (sizes if task.batch_size is None else task.batch_size))
        epochs = int((-(-steps // a_pass)).max())
        self.drawn = _draw(examples, sizes.to(device), keys, epochs)
        base = (sizes.cumsum(0) - sizes) * epochs
        self.sizes, self.a_pass, self.base, self.keys = (
            part.to(device)[slots.to(device)] for part in (sizes, a_pass, base, keys)
        )

    def segments(self) -> Iterator[tuple[int, int, int]]:
        """(first step, last step + 1, jobs at work): the cohort narrows as the smaller clients finish."""
        begin, active = 0, len(self.steps)
        while active:
            end = self.steps[active - 1]
            yield begin, end, active
            begin = end
            while active and self.steps[active - 1] == end:
                active -= 1

    def blocks(self, begin: int, end: int, active: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Pool indices [A, B], mask [A, B] and keys [A] of every step from begin to end."""
        stride = max(1, _BLOCK // (active * self.width))
        for first in range(begin, end, stride):
            step = torch.arange(first, min(first + stride, end), device=self.drawn.device)
            yield from zip(*self._at(step.view(-1, 1), active), strict=True)

    def _at(self, step: Tensor, active: int) -> tuple[Tensor, Tensor, Tensor]:
        n, a_pass = self.sizes[:active], self.a_pass[:active]
        epoch = step // a_pass  # [T, A]
        within = ((step - epoch * a_pass) * self.width).unsqueeze(-1)
        within = within + torch.arange(self.width, device=step.device)  # [T, A, B]
        last = (n - 1).view(1, -1, 1)
        place = (self.base[:active] + epoch * n).unsqueeze(-1) + torch.minimum(within, last)
        return self.drawn[place], within <= last, fold_tensor(self.keys[:active], STEP, step)


def _draw(examples: Tensor, sizes: Tensor, keys: Tensor, epochs: int) -> Tensor:
    """Every client's examples in the order of each epoch, flat: client by client, epoch by epoch."""
    device, clients = examples.device, len(sizes)
    lengths = sizes.repeat_interleave(epochs)
    segment = torch.arange(clients * epochs, device=device).repeat_interleave(lengths)
    start = lengths.cumsum(0) - lengths
    within = torch.arange(len(segment), device=device) - start[segment]
    client = segment // epochs
    key = _sort_key(keys.to(device)[client], segment - client * epochs, within)
    order = (segment << 40 | key).argsort(stable=True)  # one sort: the segment leads
    return examples[(sizes.cumsum(0) - sizes)[client] + within[order]]
