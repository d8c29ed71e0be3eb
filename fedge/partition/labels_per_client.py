"""The non-IID-l partition: every client holds l different labels."""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedge.partition.checks import as_labels, check_clients, check_whole, generator
from fedge.partition.owners import Indices, split_by_owner


def labels_per_client(y: ArrayLike | Tensor, clients: int = 100, labels: int = 2, seed: int = 0) -> list[Indices]:
    """Give each of K clients l different labels, every example to exactly one client.

    Each of the n labels is cut into l*K/n parts whose sizes differ by at most one, and each client
    gets l parts with l different labels, so l*K must be divisible by n.

    >>> labels_per_client([0, 0, 1, 1], clients=2, labels=2)[0].shape
    (2,)
    """
    array = as_labels(y)
    check_clients(clients, len(array))
    check_whole("labels", labels, 1)
    values, label, counts = np.unique(array, return_inverse=True, return_counts=True)
    _check_divisible(clients, labels, len(values))
    _check_counts(values, counts, clients, labels)
    rng = generator(seed)
    holds = _deal_labels(clients, labels, len(values), rng)
    owner = np.empty(len(array), dtype=np.int64)
    for j in range(len(values)):
        # Shuffled, because the first holders get the larger parts.
        holders = rng.permutation(np.flatnonzero(holds[:, j]))
        mine = rng.permutation(np.flatnonzero(label == j))
        owner[mine] = holders[np.arange(len(mine)) % len(holders)]
    return split_by_owner(owner, clients)


def _deal_labels(clients: int, labels: int, distinct: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draw a random matrix [clients, distinct] with equal row sums and equal column sums.

    Clients draw in turn by systematic sampling. Let r_j be the parts left of label j and k the
    clients left: sum r_j = l*k and r_j <= k. Lay the parts end to end in random order of labels
    and take those at u, u + k, ..., u + (l-1)k with u uniform in [0, k). A stretch of at most k
    parts is hit at most once, so the l labels differ; one of exactly k is hit for certain, so
    r_j <= k - 1 afterwards and the next client finds the same invariant. It cannot get stuck.
    """
    holds = np.zeros((clients, distinct), dtype=np.bool_)
    left = np.full(distinct, labels * clients // distinct)
    waiting = np.arange(clients, 0, -1)
    orders = rng.permuted(np.tile(np.arange(distinct), (clients, 1)), axis=1)
    ticks = rng.integers(waiting)[:, None] + waiting[:, None] * np.arange(labels)
    for client, (order, tick) in enumerate(zip(orders, ticks, strict=True)):
        taken = order[left[order].cumsum().searchsorted(tick, side="right")]
        holds[client, taken] = True
        left[taken] -= 1
    return holds


def _check_divisible(clients: int, labels: int, distinct: int) -> None:
    if labels > distinct:
        raise ValueError(f"labels is {labels} but y has {distinct} different labels: use labels <= {distinct}")
    if labels * clients % distinct:
        step = _clients_step(labels, distinct)
        nearest = max(step, (clients + step // 2) // step * step)
        raise ValueError(
            f"labels * clients = {labels} * {clients} = {labels * clients} must be divisible by "
            f"the {distinct} different labels in y: the nearest that works is clients={nearest}"
        )


def _check_counts(values: NDArray[Any], counts: NDArray[np.intp], clients: int, labels: int) -> None:
    parts = labels * clients // len(values)
    rarest, examples = values[counts.argmin()].item(), int(counts.min())
    if examples >= parts:
        return
    step = _clients_step(labels, len(values))
    most = examples * len(values) // labels // step * step
    fewer = f"use at most {most} clients" if most else "use fewer labels per client"
    raise ValueError(
        f"label {rarest!r} has {examples} examples but must be cut into labels * clients / "
        f"distinct labels = {labels} * {clients} / {len(values)} = {parts} parts: {fewer}, "
        "or add examples of that label"
    )


def _clients_step(labels: int, distinct: int) -> int:
    """Give the smallest K for which l*K is divisible by n; its multiples work too."""
    return distinct // math.gcd(labels, distinct)
