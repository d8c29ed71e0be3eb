"""Many steps of the server at once: the models of many rows after some of their steps, in one stack."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedge import tree
from fedge.algorithms.asynchronous import Arrivals, Asynchronous
from fedge.core import Params
from fedge.edge.draws import Array

SMALL = 1 << 22  # multiplications of a product of matrices


class Due(NamedTuple):
    """Jobs of full buffers of one row, one buffer after another, and how many jobs each has."""

    jobs: list[int]
    sizes: list[int]


class Plan(NamedTuple):
    """A row, the version it has, its full buffers, and after how many of their steps its model is kept.

    The last of `after` is the last step; `sent` says how many of them, from the first, were sent out.
    """

    row: int
    version: int
    due: Due
    after: list[int]
    sent: int


def plan(row: int, version: int, due: Due, rows: int, wanted: Container[int]) -> Plan:
    """A row that has this version now; versions that were sent out are numbered version * rows + row."""
    last = len(due.sizes)
    after = [step for step in range(last + 1) if (version + step) * rows + row in wanted]
    sent = len(after)
    return Plan(row, version, due, after if after and after[-1] == last else [*after, last], sent)


def stepped(algorithm: Asynchronous, models: list[Any], plans: list[Plan], arrivals: Arrivals) -> Params:
    """The parameters that the plans want, one plan after another: [all steps in `after`, ...].

    Of a row with the model w,  w + M d,  with M of `Asynchronous.mixing` and the moves d of its own arrivals. Small
    rows go into one product, with a matrix of blocks: a few calls cost more than all the zeros in it.
    """
    like = algorithm.base.params(models[0])
    out = tree.map_(lambda leaf: leaf.new_empty(sum(len(one.after) for one in plans), *leaf.shape), like)
    weights, staleness = arrivals.weights.double().cpu().numpy(), arrivals.staleness.double().numpy()
    begin, first = 0, 0
    for group in _groups(plans, tree.size(like)):
        end, last = begin + sum(len(one.after) for one in group), first + sum(len(one.due.jobs) for one in group)
        mixing = _blocks(algorithm, group, weights[first:last], staleness[first:last])
        met, added = _models([algorithm.base.params(models[one.row]) for one in group], group)
        mine = {name: leaf[begin:end] for name, leaf in out.items()}
        algorithm.after(met, added, _some(arrivals, slice(first, last)), torch.from_numpy(mixing), mine)
        begin, first = end, last
    return out


def _groups(plans: list[Plan], size: int) -> Iterator[list[Plan]]:
    """As many at a time as make a small product of matrices; at least one."""
    group, high, wide = list[Plan](), 0, 0
    for one in plans:
        high, wide = high + len(one.after), wide + len(one.due.jobs)
        if group and high * wide * size > SMALL:
            yield group
            group, high, wide = [], len(one.after), len(one.due.jobs)
        group.append(one)
    yield group


def _blocks(algorithm: Asynchronous, group: list[Plan], weights: Array, staleness: Array) -> Array:
    """One block per plan, its steps in `after` and its jobs: cut out of the mixing of all steps one after another."""
    sizes, which = [size for one in group for size in one.due.sizes], np.arange(len(group))
    steps, jobs = (
        which.repeat(counts) for counts in ([len(one.due.sizes) for one in group], [len(one.due.jobs) for one in group])
    )
    mixing = algorithm.mixing(sizes, weights, staleness) * (steps[:, None] == jobs)
    begins = np.cumsum([0, *(len(one.due.sizes) for one in group)]).tolist()
    taken = [begin + step - 1 if step else -1 for one, begin in zip(group, begins, strict=False) for step in one.after]
    found: Array = np.concatenate([mixing, np.zeros((1, len(weights)))])[taken]  # no step: the last line, zeros
    return found


def _models(params: list[Params], group: list[Plan]) -> tuple[Params, Params]:
    """The models that arrivals meet and that steps are added to: one for all, or one for each, [K, ...]."""
    if len(params) == 1:
        return params[0], params[0]
    stack, places = tree.stack(params), np.arange(len(group))
    met, added = (
        torch.from_numpy(places.repeat(counts))
        for counts in ([len(one.due.jobs) for one in group], [len(one.after) for one in group])
    )
    return _each(stack, met), _each(stack, added)


def _each(stack: Params, which: Tensor) -> Params:
    return tree.map_(lambda leaf: leaf[which.to(leaf.device)], stack)


def _some(arrivals: Arrivals, some: slice) -> Arrivals:
    upload = {"delta": {name: leaf[some] for name, leaf in arrivals.upload["delta"].items()}}
    start = {name: leaf[some] for name, leaf in arrivals.start.items()}
    return Arrivals(upload, start, arrivals.weights[some], arrivals.staleness[some])
