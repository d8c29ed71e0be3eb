"""Batches are drawn by address: client, epoch and step say which examples, whoever computes them.

In epoch e a client visits its n examples in the order of the 40-bit keys fold(key, ORDER, e, i), ties by position, and
cuts that order into ceil(n / B) batches. `one_client` is the definition; `Schedule` draws the same for many at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedge.core import At, Batch, Task
from fedge.engine.clients.draws_in_c import MOST, Drawn, draws
from fedge.inputs import Inputs, take
from fedge.keys import CLIENT, ORDER, STEP, fold, fold_array, fold_tensor

_BLOCK = 1 << 20  # indices drawn ahead of the steps that use them


def client_key(at: At, client: int) -> int:
    """The key of one client's work in a phase; tasks that run one after another there see the same batches."""
    return fold(at.seed, CLIENT, at.round, at.phase, client)


def client_keys(at: At, clients: Tensor) -> Tensor:
    key = fold(at.seed, CLIENT, at.round, at.phase)
    if clients.device.type == "cpu":
        return torch.from_numpy(fold_array(key, clients.numpy()).view(np.int64))
    return fold_tensor(key, clients)


def _sort_key(key: int | Tensor, epoch: int | Tensor, position: Tensor) -> Tensor:
    return (fold_tensor(key, ORDER, epoch, position) >> 24) & ((1 << 40) - 1)


def one_client(task: Task, x: Inputs, y: Tensor, key: int, limit: int | None = None) -> Iterator[Batch]:
    """The batches of one client, nothing padded; no more than `limit` of them."""
    n = len(y)
    position = torch.arange(n, device=y.device)
    step, steps = 0, task.steps(n) if limit is None else min(task.steps(n), limit)
    for epoch in range(task.epochs):
        order = _sort_key(key, epoch, position).argsort(stable=True)
        for chosen in order.split(min(task.batch_size or n, n)):
            if step == steps:
                return
            address = torch.tensor(fold(key, STEP, step), device=y.device)
            yield Batch(take(x, chosen), y[chosen], torch.ones_like(chosen, dtype=torch.bool), address)
            step += 1


class Schedule:
    """The batches of many jobs, step by step; jobs are sorted so that those still at work come first.

    `slots` says which of the clients each job belongs to (several jobs of one client see the same batches), `limits`
    how many steps each client does at most. On a GPU everything is drawn there; on a CPU with numpy, whose calls cost
    less than torch's on a few hundred numbers, or with `in_c` by a compiled program if there are few per client.
    """

    def __init__(
        self,
        task: Task,
        examples: Tensor,
        sizes: Tensor,
        keys: Tensor,
        slots: Tensor | None = None,
        limits: NDArray[Any] | None = None,
        in_c: bool = False,
    ) -> None:
        device = examples.device
        n = sizes.numpy()
        largest = int(n.max())
        self.width = min(task.batch_size or largest, largest)
        sizes_here = n.tolist()
        counts = {one: task.steps(one) for one in set(sizes_here)}
        steps = np.array([counts[one] for one in sizes_here])
        steps = steps if limits is None else np.minimum(steps, limits)
        a_pass = -(-n // (n if task.batch_size is None else task.batch_size))
        epochs = int((-(-steps // a_pass)).max())
        base = (n.cumsum() - n) * epochs
        self._native = draws() if in_c and device.type == "cpu" and largest <= MOST else None
        draw = self._native.orders if self._native else _draw_here if device.type == "cpu" else _draw
        self.drawn = draw(examples, sizes, keys, epochs)
        here = (sizes, torch.from_numpy(a_pass), torch.from_numpy(base), keys, torch.from_numpy(steps - 1))
        parts = [part.to(device) for part in here]
        if slots is not None:
            steps, parts = steps[slots.numpy()], [part[slots.to(device)] for part in parts]
        self.steps: list[int] = steps.tolist()  # [J], descending
        self.sizes, self.a_pass, self.base, self.keys, self.last_step = parts

    def segments(self) -> Iterator[tuple[int, int, int]]:
        """(first step, last step + 1, active jobs): the stack shrinks as the smaller clients finish."""
        begin, active = 0, len(self.steps)
        while active:
            end = self.steps[active - 1]
            yield begin, end, active
            begin = end
            while active and self.steps[active - 1] == end:
                active -= 1

    def blocks(self, begin: int, end: int, active: int, most: int = _BLOCK) -> Iterator[Drawn]:
        """Pool indices [T, A, B], mask [T, A, B] and keys [T, A] of the steps from begin to end, `most` at a time.

        A job among the A that has no such step repeats its last one.
        """
        stride = max(1, most // (active * self.width))
        at = self._at_in_c if self._native else self._at_here if self.drawn.device.type == "cpu" else self._at
        for first in range(begin, end, stride):
            yield at(first, min(first + stride, end), active)

    def _at(self, first: int, last: int, active: int) -> Drawn:
        step = torch.arange(first, last, device=self.drawn.device).view(-1, 1)
        if self.steps[active - 1] < last:
            step = torch.minimum(step, self.last_step[:active])  # [T, A]
        n, a_pass = self.sizes[:active], self.a_pass[:active]
        epoch = step // a_pass  # [T, A]
        within = ((step - epoch * a_pass) * self.width).unsqueeze(-1)
        within = within + torch.arange(self.width, device=step.device)  # [T, A, B]
        last_one = (n - 1).view(1, -1, 1)
        place = (self.base[:active] + epoch * n).unsqueeze(-1) + torch.minimum(within, last_one)
        return self.drawn[place], within <= last_one, fold_tensor(self.keys[:active], STEP, step)

    def _at_here(self, first: int, last: int, active: int) -> Drawn:
        step = np.arange(first, last)[:, None]
        if self.steps[active - 1] < last:
            step = np.minimum(step, self.last_step.numpy()[:active])
        n, a_pass, base, keys = (part.numpy()[:active] for part in (self.sizes, self.a_pass, self.base, self.keys))
        epoch = step // a_pass
        within = ((step - epoch * a_pass) * self.width)[..., None] + np.arange(self.width)
        last_one = (n - 1)[:, None]
        place = (base + epoch * n)[..., None] + np.minimum(within, last_one)
        address = fold_array(fold_array(keys, STEP), step).view(np.int64)
        return self.drawn[torch.from_numpy(place)], torch.from_numpy(within <= last_one), torch.from_numpy(address)

    def _at_in_c(self, first: int, last: int, active: int) -> Drawn:
        assert self._native is not None
        parts = (self.sizes, self.a_pass, self.base, self.keys, self.last_step, self.drawn)
        return self._native.steps(first, last, active, self.width, parts)


def _draw(examples: Tensor, sizes: Tensor, keys: Tensor, epochs: int) -> Tensor:
    """Every client's examples in the order of each epoch, flat: client by client, epoch by epoch."""
    device, total = examples.device, len(examples) * epochs
    sizes, keys = sizes.to(device, non_blocking=True), keys.to(device, non_blocking=True)
    lengths = sizes.repeat_interleave(epochs, output_size=len(sizes) * epochs)
    segment = torch.arange(len(lengths), device=device).repeat_interleave(lengths, output_size=total)
    start = lengths.cumsum(0) - lengths
    within = torch.arange(total, device=device) - start[segment]
    client = segment // epochs
    key = _sort_key(keys[client], segment - client * epochs, within)
    order = (segment << 40 | key).argsort(stable=True)  # one sort: the segment leads
    return examples[(sizes.cumsum(0) - sizes)[client] + within[order]]


def _draw_here(examples: Tensor, sizes: Tensor, keys: Tensor, epochs: int) -> Tensor:
    """The same with numpy."""
    n = sizes.numpy()
    lengths = np.repeat(n, epochs)
    segment = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(len(segment)) - np.repeat(lengths.cumsum() - lengths, lengths)
    epoch = np.tile(np.arange(epochs), len(n))
    one = fold_array(np.repeat(fold_array(keys.numpy(), ORDER), epochs), epoch)  # a key for every client and epoch
    key = fold_array(np.repeat(one, lengths), within).view(np.int64) >> 24 & ((1 << 40) - 1)
    begin = np.repeat(n.cumsum() - n, n * epochs)
    return examples[torch.from_numpy(begin + _in_order(segment, key, within, int(n.max())))]


def _in_order(segment: NDArray[Any], key: NDArray[Any], within: NDArray[Any], most: int) -> NDArray[Any]:
    """The positions within each segment, sorted by 40-bit key; in one word if all three fit, which sorts faster."""
    bits = most.bit_length()
    if bits + 40 + len(segment).bit_length() < 64:
        word = segment << (40 + bits) | key << bits | within
        word.sort()
        found: NDArray[Any] = word & ((1 << bits) - 1)
    else:
        found = within[(segment << 40 | key).argsort(kind="stable")]
    return found
